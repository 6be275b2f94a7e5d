"""What a parameter's tags mean, read without any process."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from core.distributed.contract.gradient_contract import (
    DEFAULT_RULES,
    ContractError,
    GradSyncRule,
    declare_gradient,
    read_contracts,
)


@dataclass
class Sizes:
    """Stands in for ProcessGroups: (size, rank) by group name."""

    known: dict[str, tuple[int, int]] = field(default_factory=dict)

    def size(self, name: str) -> int:
        return self.known.get(name, (1, 0))[0]

    def rank(self, name: str) -> int:
        return self.known.get(name, (1, 0))[1]

    def require(self, name: str) -> object:
        if name not in self.known:
            raise RuntimeError(f"no group {name}")
        return name


@dataclass
class Config:
    sequence_parallel: bool = False
    calculate_per_token_loss: bool = False
    qk_layernorm: bool = False


TP4 = {"dp_cp": (6, 0), "tp": (4, 1)}


def tagged(**tags: Any) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(3))
    for name, value in tags.items():
        setattr(param, name, value)
    return param


def read(param: nn.Parameter, known: dict[str, tuple[int, int]], config: Any = None, name: str = "w", **flags: Any):
    return read_contracts([(name, param)], [], Sizes(known), config, **flags)[name]


def test_an_untagged_parameter_is_a_mean_over_data_parallelism():
    contract = read(tagged(), {"dp_cp": (6, 0)})
    assert contract.reductions == ("sum over dp_cp / 6",)
    assert contract.data_group == "dp_cp" and contract.counts_in_norm and not contract.crosses_stages


def test_per_token_loss_leaves_the_sum():
    assert read(tagged(), {"dp_cp": (6, 0)}, Config(calculate_per_token_loss=True)).divisor == 1


def test_an_expert_is_reduced_over_its_own_group_and_divided_by_the_whole():
    contract = read(tagged(allreduce=False), {"dp_cp": (6, 0), "expt_dp": (2, 0), "ep": (3, 1)})
    assert contract.reductions == ("sum over expt_dp / 6",)
    assert contract.is_expert and contract.sharded_over == ("ep",)


def test_a_sequence_parallel_parameter_is_added_over_tp():
    contract = read(tagged(sequence_parallel=True), TP4, Config(sequence_parallel=True))
    assert contract.reductions == ("sum over dp_cp / 6", "sum over tp (tensor-parallel sum)")
    assert contract.partial_over == ("tp",) and contract.replicated_over == ("tp",)
    assert not contract.counts_in_norm  # tp rank 1 holds the copy that rank 0 counts


def test_a_complete_parameter_under_sequence_parallelism_gets_no_rule():
    assert read(tagged(sequence_parallel=False), TP4, Config(sequence_parallel=True)).rules == ()


def test_an_undeclared_replicated_parameter_under_sequence_parallelism_is_refused():
    with pytest.raises(ContractError, match="'w' is replicated over 4 tensor-parallel ranks"):
        read(tagged(), TP4, Config(sequence_parallel=True))


def test_a_tensor_parallel_parameter_is_sharded_and_counted_on_every_rank():
    contract = read(tagged(tensor_model_parallel=True), TP4, Config(sequence_parallel=True))
    assert contract.sharded_over == ("tp",) and contract.rules == () and contract.counts_in_norm


def test_the_tag_without_the_config_is_refused():
    with pytest.raises(ContractError, match="would make it 4 times too large"):
        read(tagged(sequence_parallel=True), TP4, Config(sequence_parallel=False))


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ({"tensor_model_parallel": True, "average_gradients_across_tp_domain": True}, "must not be averaged"),
        ({"sequence_parallel": True, "average_gradients_across_tp_domain": True}, "to be added and to be averaged"),
    ],
)
def test_contradictory_tags_are_refused_by_name(tags: dict[str, bool], message: str):
    with pytest.raises(ContractError, match=f"'w'.*{message}"):
        read(tagged(**tags), TP4, Config(sequence_parallel=True))


def test_a_slice_declared_partial_is_refused():
    param = declare_gradient(tagged(tensor_model_parallel=True), partial_over=("tp",))
    with pytest.raises(ContractError, match="both split over tensor parallelism and declared partial"):
        read(param, TP4)


def test_average_over_tp_is_a_mean_rule():
    contract = read(tagged(average_gradients_across_tp_domain=True), TP4)
    assert contract.rules == ("mean over tp (tensor-parallel mean)",)


def test_qk_layernorm_is_partial_by_its_config_and_name_as_users_know_it():
    param = tagged()
    contract = read(param, TP4, Config(qk_layernorm=True), "layers.0.q_layernorm.weight")
    assert contract.partial_over == ("tp",)
    assert read(param, TP4, Config(qk_layernorm=True)).partial_over == ()


PP = {"dp_cp": (2, 0), "pp": (3, 2), "embd": (2, 1), "pos_embd": (2, 1)}


def test_a_shared_embedding_crosses_stages_and_counts_on_the_first_one():
    last = read(tagged(shared_embedding=True), PP)
    assert last.rules == ("sum over embd (tied word embedding sum)",)
    assert last.crosses_stages and not last.counts_in_norm
    assert read(tagged(shared_embedding=True), {**PP, "embd": (2, 0)}).counts_in_norm


def test_a_shared_embedding_outside_the_embedding_group_is_an_error():
    with pytest.raises(RuntimeError, match="no group embd"):
        read(tagged(shared_embedding=True), {"dp_cp": (2, 0), "pp": (3, 1)})


def test_one_stage_ties_nothing():
    assert read(tagged(shared_embedding=True), {"dp_cp": (2, 0), "pp": (1, 0)}).rules == ()


def test_rules_are_listed_as_they_run_within_a_stage_and_then_across():
    param = declare_gradient(tagged(pipeline_parallel=True), partial_over=("tp",))
    contract = read(param, {**PP, "tp": (2, 0)})
    assert [rule.split(" (")[0] for rule in contract.rules] == ["sum over tp", "sum over pp"]


def test_a_declared_axis_that_no_rule_reduces_is_refused():
    param = declare_gradient(tagged(), partial_over=("cp",))
    with pytest.raises(ContractError, match="partial over 'cp' \\(2 ranks\\) and no sync rule"):
        read(param, {"dp_cp": (2, 0), "cp": (2, 0)})


def test_a_registered_rule_serves_what_it_says():
    rule = GradSyncRule("mine", "ep", "mean", lambda contract: "ep" in contract.averaged_over)
    param = declare_gradient(tagged(), averaged_over=("ep",))
    contract = read(param, {"dp_cp": (1, 0), "ep": (2, 0)}, rules=(*DEFAULT_RULES, rule))
    assert contract.rules == ("mean over ep (mine)",)


def test_an_unknown_group_is_an_error_and_not_a_group_of_one():
    with pytest.raises(RuntimeError, match="no group tp"):
        read(tagged(sequence_parallel=True), {"dp_cp": (2, 0)})


class TiedHead(nn.Module):
    share_embeddings_and_output_weights = True

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(5, 2)
        self.position_embeddings = nn.Embedding(7, 2)

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        return self.word.weight


def test_embeddings_are_found_by_the_methods_that_users_models_have():
    model = TiedHead()
    known = {"dp_cp": (1, 0), "pp": (2, 0), "embd": (2, 0), "pos_embd": (2, 0)}
    contracts = read_contracts(model.named_parameters(), model.modules(), Sizes(known), None)
    assert contracts["word.weight"].partial_over == ("embd",)
    assert contracts["position_embeddings.weight"].partial_over == ("pos_embd",)


def test_an_experts_sequence_parallel_tag_means_its_own_tensor_parallel_group():
    known = {"dp_cp": (2, 0), "expt_dp": (1, 0), "ep": (2, 0), "tp": (2, 0), "expt_tp": (1, 0)}
    config = Config(sequence_parallel=True)
    assert read(tagged(allreduce=False, sequence_parallel=True), known, config).rules == ()
    split = read(tagged(allreduce=False, sequence_parallel=True), {**known, "expt_tp": (2, 0)}, config)
    assert split.rules == ("sum over expt_tp (expert tensor-parallel sum)",)


def test_qk_layernorm_asks_for_no_tensor_parallel_group_where_there_is_none():
    contract = read(tagged(), {"dp_cp": (2, 0)}, Config(qk_layernorm=True), "k_layernorm.weight", rules=())
    assert contract.partial_over == ()


def test_a_norm_whose_name_only_contains_the_words_is_left_alone():
    for name in ("block_layernorm.weight", "seq_layernorm.weight"):
        assert read(tagged(), TP4, Config(qk_layernorm=True), name).partial_over == ()
    declared = declare_gradient(tagged())
    contract = read(declared, TP4, Config(qk_layernorm=True), "q_layernorm.weight")
    assert contract.partial_over == ()

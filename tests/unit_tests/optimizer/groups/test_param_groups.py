"""Parameter groups: which keys match, what a group gets, and one list of groups on every rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.optimizer import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from core.optimizer.groups.param_groups import GroupKey, ParamGroups
from core.optimizer.groups.param_key import decays_by_default, is_embedding_or_output
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, train, wrap


class Tagged(nn.Module):
    """An embedding and an output layer with Megatron's tag, and what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.linear = nn.Linear(3, 3)
        self.q_layernorm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 7, bias=False)
        for module in (self.embedding, self.head):
            module.weight.is_embedding_or_output_parameter = True


def named(model: nn.Module) -> list[tuple[str, nn.Parameter, bool]]:
    return [(name, param, False) for name, param in model.named_parameters()]


def numbers(config: OptimizerConfig, model: nn.Module, overrides: Any = None) -> dict[str, dict[str, Any]]:
    groups = ParamGroups(config, named(model), overrides)
    groups.agree([])
    listed = groups.torch_groups(config)
    return {name: listed[groups.of(param)] for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (ParamKey(name="linear.*"), {"linear.weight", "linear.bias"}),
        (ParamKey(name=("*.bias", "head.weight")), {"linear.bias", "q_layernorm.bias", "head.weight"}),
        (ParamKey(name="linear.weigh?"), {"linear.weight"}),
        (ParamKey(name="weight"), set()),
        (ParamKey(attr="is_embedding_or_output_parameter"), {"embedding.weight", "head.weight"}),
        (ParamKey(predicate=ParamPredicate("wide", lambda param: param.shape[-1] == 7)), set()),
        (ParamKey(predicate=ParamPredicate("tall", lambda p: len(p) == 7)), {"embedding.weight", "head.weight"}),
        (
            ParamKey(with_name_predicate=ParamWithNamePredicate("v", lambda p, n: p.dim() == 1 and "norm" in n)),
            {"q_layernorm.weight", "q_layernorm.bias"},
        ),
        (ParamKey(name="linear.bias", attr="is_embedding_or_output_parameter"),
         {"linear.bias", "embedding.weight", "head.weight"}),
    ],
)  # fmt: skip
def test_a_key_matches_what_meets_any_of_its_criteria(key: ParamKey, expected: set[str]) -> None:
    assert {name for name, param in Tagged().named_parameters() if key.matches(param, name)} == expected


def test_predicates_of_one_name_are_one_key() -> None:
    first, second = (ParamKey(predicate=ParamPredicate("vectors", lambda p, n=n: p.dim() == n)) for n in (1, 2))
    assert first == second and len({first, second}) == 1
    assert first != ParamKey(predicate=ParamPredicate("others", lambda p: True))
    with pytest.raises(ValueError, match="no criterion"):
        ParamKey()
    with pytest.raises(ValueError, match="tuple"):
        ParamKey(name=["a", "b"])  # type: ignore[arg-type]


def test_by_default_biases_and_vectors_do_not_decay_and_the_tagged_layers_learn_with_their_own_rate() -> None:
    config = OptimizerConfig(lr=0.1, min_lr=0.01, weight_decay=0.5, decoupled_lr=0.3, decoupled_min_lr=0.02)
    found = numbers(config, Tagged())
    for name, group in found.items():
        tagged = name in ("embedding.weight", "head.weight")
        assert group["lr"] == group["max_lr"] == (0.3 if tagged else 0.1), name
        assert group["min_lr"] == (0.02 if tagged else 0.01), name
        assert group["is_decoupled_lr"] is tagged and group["default_config"] is not tagged
        assert group["weight_decay"] == (0.5 if name.endswith("weight") and "norm" not in name else 0.0), name
    without = numbers(OptimizerConfig(lr=0.1, min_lr=0.01), Tagged())
    assert {group["max_lr"] for group in without.values()} == {0.1}
    assert not any(group["is_decoupled_lr"] for group in without.values())
    half = numbers(OptimizerConfig(lr=0.1, min_lr=0.01, decoupled_lr=0.3), Tagged())
    assert half["head.weight"]["min_lr"] == 0.01


def test_norms_of_queries_and_keys_decay_where_that_is_asked_for() -> None:
    found = numbers(OptimizerConfig(lr=0.1, weight_decay=0.5, apply_wd_to_qk_layernorm=True), Tagged())
    assert {name for name, group in found.items() if group["weight_decay"] == 0} == {"linear.bias"}


def test_biases_of_stacked_experts_are_biases() -> None:
    assert not decays_by_default("experts.bias1", nn.Parameter(torch.zeros(4, 8)))
    assert decays_by_default("unbiased.weight", nn.Parameter(torch.zeros(4, 8)))
    assert decays_by_default("experts.weight1", nn.Parameter(torch.zeros(4, 8, 3)))
    assert is_embedding_or_output("model.wte.weight", nn.Parameter(torch.zeros(2, 2)))
    assert not is_embedding_or_output("model.wteam.weight", nn.Parameter(torch.zeros(2, 2)))


def test_overrides_that_match_one_parameter_are_added_up_and_replace_the_standard_ones() -> None:
    config = OptimizerConfig(lr=0.1, weight_decay=0.5)
    overrides = {
        ParamKey(name="linear.*"): {"lr_mult": 0.5, "eps": 1e-3},
        ParamKey(name="*.weight"): {"wd_mult": 2.0, "min_lr": 0.05},
        ParamKey(name="*linear*"): {"lr_mult": 0.5},
    }
    found = numbers(config, Tagged(), overrides)
    group = found["linear.weight"]
    assert (group["lr"], group["max_lr"], group["min_lr"]) == (0.05, 0.1, 0.05)
    assert (group["weight_decay"], group["eps"]) == (1.0, 1e-3)
    assert found["linear.bias"]["weight_decay"] == 0.5, "given overrides take the place of the standard ones"
    rates = {ParamKey(name="linear.*"): {"lr_mult": 0.5}}
    both = numbers(config, Tagged(), {**get_standard_config_overrides(config), **rates})
    assert (both["linear.bias"]["weight_decay"], both["linear.bias"]["lr"]) == (0.0, 0.05)
    starts = numbers(config, Tagged(), {ParamKey(name="linear.weight"): {"start_wd": 0.2, "end_wd": 0.4, "wd_mult": 3}})
    assert starts["linear.weight"]["weight_decay"] == pytest.approx(0.6)
    assert starts["linear.weight"]["end_wd"] == 0.4


def test_contradicting_overrides_are_refused_and_the_message_names_both_keys() -> None:
    overrides = {ParamKey(name="linear.*"): {"lr_mult": 0.5}, ParamKey(name="*.bias"): {"lr_mult": 2.0}}
    with pytest.raises(
        ValueError, match=r"'linear.bias': ParamKey\(name='linear.\*'\) sets lr_mult=0.5 .* lr_mult=2.0"
    ):
        ParamGroups(OptimizerConfig(lr=0.1), named(Tagged()), overrides).agree([])


def test_groups_that_differ_in_a_learning_rate_only_have_names_of_their_own() -> None:
    overrides = {ParamKey(name="head.*"): {"max_lr": 0.5}, ParamKey(name="linear.*"): {"max_lr": 2.0}}
    found = numbers(OptimizerConfig(lr=0.1), Tagged(), overrides)
    names = {group["name"] for group in found.values()}
    assert names == {"adam", "adam max_lr", "adam max_lr #2"}


@ranks(1, 3, nightly=(2,))
def test_every_rank_lists_the_same_groups_though_stages_hold_different_parameters(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    model = nn.Module()
    if rank == 0:
        model.register_parameter("matrix", nn.Parameter(torch.ones(2, 2)))
    elif rank == 1:
        model.register_parameter("bias", nn.Parameter(torch.ones(3)))
    ddp = wrap(model)
    config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=1.0, weight_decay=0.5, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [ddp])
    listed = [(group["name"], group["weight_decay"], group["lr"]) for group in optimizer.param_groups]
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, listed)
    assert everywhere == [listed] * world
    assert [wd for _, wd, _ in listed] == [0.5, 0.0][: max(1, min(2, world))]
    assert [len(group["params"]) for group in optimizer.param_groups] == {
        (0, 1): [1], (1, 1): [0], (0, 2): [1, 0], (1, 2): [0, 1], (2, 2): [0, 0],
    }[rank, len(listed)]  # fmt: skip
    optimizer.zero_grad()
    if rank < 2:
        next(model.parameters()).sum().backward()
    else:
        ddp.reducer.note_forward()
    finalize_model_grads([ddp])
    assert optimizer.step()[0]
    for param in model.parameters():
        assert torch.equal(param, torch.full_like(param, 1 - 1 - 0.5 if rank == 0 else 0.0))
    optimizer.load_state_dict(optimizer.state_dict())


@ranks(2)
def test_a_key_that_matches_nothing_anywhere_is_refused_on_all_ranks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = nn.Module()
    model.register_parameter(("first", "second")[rank], nn.Parameter(torch.ones(2, 2)))
    model.register_parameter("frozen", nn.Parameter(torch.ones(2, 2), requires_grad=False))
    ddp = wrap(model)
    config = OptimizerConfig(lr=1.0)
    with pytest.raises(ValueError, match=r"ParamKey\(name='thirth'\) in config_overrides matches no parameter"):
        get_megatron_optimizer(config, [ddp], config_overrides={ParamKey(name="thirth"): {"lr_mult": 2.0}})
    overrides = {ParamKey(name=name): {"lr_mult": 2.0} for name in ("first", "second", "frozen")}
    optimizer = get_megatron_optimizer(config, [ddp], config_overrides=overrides)
    assert [group["lr"] for group in optimizer.param_groups] == [2.0]
    third = get_megatron_optimizer(config, [ddp], overrides)  # where newer versions of Megatron have it
    assert [group["lr"] for group in third.param_groups] == [2.0]
    with pytest.raises(ValueError, match="both given"):
        get_megatron_optimizer(config, [ddp], lambda name, param: True, config_overrides=overrides)


@ranks(2)
def test_a_contradiction_that_one_stage_sees_is_raised_on_all(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = nn.Module()
    model.register_parameter(("first", "second")[rank], nn.Parameter(torch.ones(2, 2)))
    overrides = {ParamKey(name="*"): {"lr_mult": 2.0}, ParamKey(name="second"): {"lr_mult": 3.0}}
    with pytest.raises(ValueError, match=r"'second': ParamKey\(name='\*'\) sets lr_mult=2.0"):
        get_megatron_optimizer(OptimizerConfig(lr=1.0), [wrap(model)], config_overrides=overrides)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_each_group_moves_with_its_own_numbers(rank: int, world: int, strategy: str) -> None:
    """Against plain SGD, every parameter with its own learning rate and decay."""
    parallel_state.initialize_model_parallel()
    model, reference = make_net(), make_net()
    rates = {"first.weight": (0.02, 0.0), "first.bias": (0.005, 0.1), "third.weight": (0.01, 0.2)}
    groups = [
        {"params": [param], "lr": rates.get(name, (0.01, 0.1))[0], "weight_decay": rates.get(name, (0.01, 0.1))[1]}
        for name, param in reference.named_parameters()
    ]
    plain = torch.optim.SGD(groups, lr=0.01)
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=60)
    config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=0.01, weight_decay=0.1, clip_grad=0.0)
    overrides = {
        ParamKey(name="first.weight"): {"max_lr": 0.02, "wd_mult": 0.0},
        ParamKey(name="first.bias"): {"lr_mult": 0.5},
        ParamKey(name="third.weight"): {"wd_mult": 2.0},
    }
    optimizer = get_megatron_optimizer(config, [ddp], config_overrides=overrides)
    for microbatch in range(3):
        train(ddp, optimizer, rank, microbatch)
        plain.zero_grad()
        for source in range(world):
            (loss_of(reference, source, microbatch) / world).backward()
        plain.step()
    start = dict(make_net().named_parameters())
    for name, param in reference.named_parameters():
        assert (param - start[name]).norm() > 1e-3, f"{name}: the reference has not moved"
        torch.testing.assert_close(model.get_parameter(name), param, rtol=1e-10, atol=1e-12)


def test_a_group_says_in_words_what_it_is() -> None:
    key = GroupKey("adam", (("max_lr", 0.3), ("wd_mult", 0.0)), True, True)
    assert key.name == "adam max_lr wd_mult=0.0 decoupled expert"

"""Families that ship no plan, split by policies; and heads of keys and values that are fewer than the ranks."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core import parallel_state
from core.hugging_face import POLICIES, PlanError, Policy, load_split, read_plan, save_split, split_model
from core.hugging_face.read.plan import Style
from core.hugging_face.read.policies import longest_fit
from tests.families.check import check_on_rank
from tests.families.tiny import families, families_with_policy, model_class, tiny_config, tiny_inputs, tiny_model
from tests.unit_tests.hugging_face.models import small
from tests.unit_tests.ranks import ranks

FALCONS: list[dict[str, Any]] = [
    {"new_decoder_architecture": True},
    {"multi_query": False, "num_kv_heads": 8},
    {"multi_query": False, "num_kv_heads": 8, "alibi": True},
    {"alibi": True},
    {"alibi": True, "attn_implementation": "eager"},
]
OTHERS = [("falcon/FalconConfig", values) for values in FALCONS] + [
    ("gpt2/GPT2Config", {"add_cross_attention": True, "vocab_size": 97}),
    ("bert/BertConfig", {"vocab_size": 97}),  # a tied bias that is padded
    ("t5/T5Config", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
]


@ranks(2)
@pytest.mark.parametrize("name", ["gpt2/GPT2Config", "bert/BertConfig", "t5/T5Config", "mamba/MambaConfig"])
def test_a_family_without_a_plan_is_equal_to_one_process(rank: int, world: int, name: str) -> None:
    verdict = check_on_rank(name, families_with_policy()[name], world)
    assert verdict.answer == "equal", verdict


@pytest.mark.nightly
@ranks(2, 4, timeout_s=120.0)
@pytest.mark.parametrize("name", [name.partition(",")[0].replace("-", "_") for name in POLICIES if "," not in name])
def test_every_policy_is_equal_to_one_process(rank: int, world: int, name: str) -> None:
    full, kind = next(found for found in families_with_policy().items() if found[0].startswith(f"{name}/"))
    verdict = check_on_rank(full, kind, world)
    assert verdict.answer == "equal", verdict


@pytest.mark.nightly
@ranks(2, 4, timeout_s=120.0)
@pytest.mark.parametrize("case", range(len(OTHERS)))
def test_variants_of_families_are_equal_to_one_process(rank: int, world: int, case: int) -> None:
    name, values = OTHERS[case]
    verdict = check_on_rank(name, families_with_policy()[name], world, values)
    assert verdict.answer == "equal", verdict


@ranks(2, nightly=(4,))
def test_a_head_of_keys_that_ranks_share_gets_the_sum_of_their_gradients(rank: int, world: int) -> None:
    verdict = check_on_rank("qwen3", families()["qwen3/Qwen3Config"], world, {"num_key_value_heads": 1})
    assert verdict.answer == "equal", verdict
    assert verdict.summed[0] == 4 * 4  # of four layers: keys, values and both norms


@ranks(4)
def test_two_heads_of_keys_on_four_ranks_are_shared_by_pairs(rank: int, world: int) -> None:
    model = small("llama", num_key_value_heads=2)
    reference = copy.deepcopy(model)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    report = split_model(model)
    attention = model.model.layers[0].self_attn
    keys = attention.k_proj(torch.ones(1, 32, dtype=torch.float64))
    whole = reference.model.layers[0].self_attn.k_proj(torch.ones(1, 32, dtype=torch.float64))
    torch.testing.assert_close(keys, whole[:, rank // 2 * 8 : (rank // 2 + 1) * 8])
    assert attention.num_key_value_groups == 2
    assert "model.layers.0.self_attn.v_proj.weight" in report.partial


@ranks(2)
def test_heads_of_keys_that_do_not_divide_are_copied_for_their_queries(rank: int, world: int) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3}  # a rank's three queries use two heads of keys
    verdict = check_on_rank("qwen3", families()["qwen3/Qwen3Config"], world, sizes)
    assert verdict.answer == "equal", verdict
    assert verdict.summed[0] == 4 * 4  # of four layers: keys, values and both norms


def test_heads_of_keys_fit_every_size_that_their_queries_fit() -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6}
    plan = read_plan(small("llama", **sizes))
    assert plan.sizes() == [1, 2, 3, 4, 6, 12]
    with pytest.raises(PlanError, match=r"q_proj.weight' .* holds 12 heads.* fit this model: 1, 2, 3, 4, 6, 12"):
        plan.at(8)


@ranks(2)
def test_a_saved_gpt2_is_that_of_the_whole_model_bit_for_bit_and_loads_in_slices(
    rank: int, world: int, tmp_path: Path
) -> None:
    check_saving("gpt2/GPT2Config", tmp_path, rank, world)


@pytest.mark.nightly
@ranks(2, timeout_s=120.0)
@pytest.mark.parametrize("name", [name.partition(",")[0].replace("-", "_") for name in POLICIES if "," not in name])
def test_every_saved_directory_is_that_of_the_whole_model(rank: int, world: int, name: str, tmp_path: Path) -> None:
    check_saving(next(full for full in families_with_policy() if full.startswith(f"{name}/")), tmp_path, rank, world)


def check_saving(name: str, tmp_path: Path, rank: int, world: int) -> None:
    reference = tiny_model(tiny_config(families_with_policy()[name])).float()
    inputs = {key: v.float() if v.is_floating_point() else v for key, v in _tensors(tiny_inputs(reference)).items()}
    model = copy.deepcopy(reference)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    split_model(model, example=inputs)
    save_split(model, tmp_path / "split")
    torch.distributed.barrier()
    loaded = model_class(type(reference.config)).from_pretrained(tmp_path / "split")
    for key, parameter in reference.named_parameters():
        assert torch.equal(loaded.get_parameter(key), parameter), key
    sliced = load_split(tmp_path / "split", example=inputs)
    assert {key: p.shape for key, p in sliced.named_parameters()} == {
        key: p.shape for key, p in model.named_parameters()
    }
    for key, parameter in sliced.named_parameters():
        assert torch.equal(parameter, model.get_parameter(key)), key


def _tensors(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}


@ranks(2)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"divided": {}}, "its forward fails once it is split"),
        (
            {"rules": {**POLICIES["gpt2"].rules, "attn.c_attn": "conv1d_colwise"}},
            "its output for the example differs",
        ),
        ({"rules": {**POLICIES["gpt2"].rules, "mlp.c_proj": "rowwise"}}, "its forward fails once it is split"),
        ({"rules": {**POLICIES["gpt2"].rules, "mlp.c_fc": Style(weight=-1, bias=-1)}}, "no seam of the plan sums it"),
        ({"rules": {"mlp.c_fc": "columns"}}, "has style 'columns', which is unknown here"),
        ({"divided": {"attn": ("heads",)}}, "the policy divides 'heads' of module 'transformer.h.0.attn'"),
    ],
)
def test_a_policy_that_is_wrong_is_refused(rank: int, world: int, changes: dict[str, Any], message: str) -> None:
    model = tiny_model(tiny_config(families_with_policy()["gpt2/GPT2Config"]))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with pytest.raises(PlanError, match=message):
        split_model(model, read_plan(model, dataclasses.replace(POLICIES["gpt2"], **changes)))


@ranks(2)
def test_a_policy_of_the_users_own_stands_in_place_of_a_familys_plan(rank: int, world: int) -> None:
    model = small("llama")
    reference = copy.deepcopy(model)
    policy = Policy({"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"})
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    report = split_model(model, read_plan(model, policy))
    assert {name.split(".")[-2] for name in report.plan.splits} == {"gate_proj", "up_proj", "down_proj"}
    assert model.model.layers[0].mlp.up_proj.weight.shape == (32, 32)
    ids = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits)


def test_a_policys_heads_must_divide() -> None:
    plan = read_plan(tiny_model(tiny_config(families_with_policy()["gpt2/GPT2Config"])))
    assert plan.sizes() == [1, 2, 4, 8]
    with pytest.raises(PlanError, match=r"'transformer.h.0.attn.num_heads' counts 8.* fit this model: 1, 2, 4"):
        plan.at(16)
    assert "4 x transformer.h.*.attn.num_heads: 2 of 8" in plan.table(4)


def test_the_longest_end_of_a_name_wins() -> None:
    ends = ("dense", "output.dense", "layer.*.output.dense", "put.dense")
    assert longest_fit("bert.layer.3.output.dense", ends) == "layer.*.output.dense"
    assert longest_fit("bert.output.dense", ends) == "output.dense"
    assert longest_fit("bert.input.dense", ends) == "dense"
    assert longest_fit("bert.condense", ends) is None

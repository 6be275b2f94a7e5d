"""Experts that cannot be built are refused by the config, before any group, with the arithmetic and what is legal."""

from __future__ import annotations

import re
from typing import Any

import pytest

from core import parallel_state
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.moe import MoELayer
from core.transformer import MLP
from tests.unit_tests.moe.moe_reference import make_config
from tests.unit_tests.ranks import ranks

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"moe_router_topk": 5}, "moe_router_topk is 5 and there are 4 experts.*use 1 <= moe_router_topk <= 4"),
    ({"moe_router_topk": 0}, "moe_router_topk must be an integer of at least 1, got 0"),
    (
        {"num_moe_experts": 6, "expert_model_parallel_size": 4},
        r"num_moe_experts 6 is not divisible by expert_model_parallel_size 4 \(6 / 4 = 1.5\).*Use 4 or 8 experts, "
        "or an expert-parallel size of 3 or 6",
    ),
    ({"num_moe_experts": 2, "expert_model_parallel_size": 4}, "Use 4 experts, or an expert-parallel size of 2"),
    (
        {"num_moe_experts": None, "expert_model_parallel_size": 2},
        "expert_model_parallel_size is 2.*set num_moe_experts",
    ),
    ({"num_moe_experts": 0}, "num_moe_experts must be an integer of at least 1, or None, got 0"),
    (
        {"moe_ffn_hidden_size": 9, "expert_tensor_parallel_size": 2},
        r"hidden size 9 is not divisible by its tensor-parallel size 2 \(9 / 2 = 4.5\); use 8 or 10",
    ),
    ({"moe_router_topk": 1}, "Set moe_router_pre_softmax=True"),
    ({"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True}, "clear one of them"),
    ({"moe_router_enable_expert_bias": True}, "set moe_router_score_function='sigmoid'"),
    ({"moe_router_score_function": "tanh"}, "moe_router_score_function is 'tanh', expected one of"),
    ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type is 'flex', expected one of"),
    (
        {"moe_expert_capacity_factor": 0.0},
        "moe_expert_capacity_factor must be a finite number above 0",
    ),
    ({"moe_aux_loss_coeff": -1.0}, "moe_aux_loss_coeff must be a finite number of at least 0, got -1.0"),
    ({"moe_layer_freq": 0}, "moe_layer_freq must be an integer of at least 1, or a list, got 0"),
    ({"moe_layer_freq": [1, 0, 1]}, "expected one 0 or 1 for each of 2 layers"),
    ({"moe_shared_expert_gate": True}, "needs moe_shared_expert_intermediate_size"),
    (
        {"moe_shared_expert_intermediate_size": 9, "tensor_model_parallel_size": 2},
        r"moe_shared_expert_intermediate_size 9 is not divisible by tensor_model_parallel_size 2 .*use 8 or 10",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[re.sub(r"\W+", " ", str(case[0])) for case in REFUSED])
def test_the_config_refuses_what_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**changes)


@ranks(2)
def test_a_layer_refuses_groups_of_another_size(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    with pytest.raises(ValueError, match="config.expert_model_parallel_size is 1 and the group 'ep' has 2 ranks"):
        MoELayer(make_config())


@pytest.mark.parametrize(
    ("freq", "expected"), [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), (3, [1, 0, 0, 1]), ([0, 1, 1, 0], [0, 1, 1, 0])]
)
def test_the_frequency_says_which_layers_hold_experts(freq: Any, expected: list[int]) -> None:
    model = GPTModel(make_config(num_layers=4, moe_layer_freq=freq), ProcessGroups())
    assert [isinstance(layer.mlp, MoELayer) for layer in model.decoder.layers] == [bool(is_moe) for is_moe in expected]
    assert [isinstance(layer.mlp, MLP) for layer in model.decoder.layers] == [not is_moe for is_moe in expected]


def test_stages_have_the_experts_of_their_layers() -> None:
    config = make_config(num_layers=4, moe_layer_freq=2)
    stage = GPTModel(config, ProcessGroups(), pre_process=False, layer_numbers=[1, 2])
    assert [isinstance(layer.mlp, MoELayer) for layer in stage.decoder.layers] == [False, True]

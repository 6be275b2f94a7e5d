"""The mixture of experts on one process: against a Python loop over its tokens, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.moe import MoELayer
from core.process_groups import ProcessGroups
from tests.unit_tests.moe_reference import (
    EXPERTS,
    add_noise,
    assert_close,
    balance_loss_by_hand,
    capacity_by_hand,
    loop_over_tokens,
    make_config,
    tokens_of,
)

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax after top-k": {},
    "softmax before top-k": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "top-1": {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    "every expert": {"moe_router_topk": EXPERTS},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk": 3},
    "sigmoid with bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
}


def make_layer(**changes: Any) -> MoELayer:
    layer = MoELayer(make_config(**changes), name="mlp")
    add_noise(layer, ProcessGroups())
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.tensor([0.5, -0.3, 0.0, 0.2]))
    return layer


def assert_same_as_loop(layer: MoELayer, kept: torch.Tensor | None = None) -> None:
    hidden = tokens_of(0).requires_grad_()
    params = dict(layer.named_parameters())
    weights = torch.rand(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    expected = loop_over_tokens(layer, hidden, kept)
    wanted = torch.autograd.grad((expected * weights).sum(), [hidden, *params.values()])
    output = layer(hidden)
    got = torch.autograd.grad((output * weights).sum(), [hidden, *params.values()])

    assert_close("output", output.detach(), expected.detach())
    for name, have, want in zip(["hidden", *params], got, wanted, strict=True):
        assert_close(name, have, want)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("router", ROUTERS)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(router: str, dispatcher: str) -> None:
    assert_same_as_loop(make_layer(moe_token_dispatcher_type=dispatcher, **ROUTERS[router]))


def test_experts_may_be_gated_and_without_bias() -> None:
    assert_same_as_loop(make_layer(activation="swiglu", add_bias_linear=False))
    assert_same_as_loop(make_layer(activation="swiglu"))


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_an_expert_takes_no_more_than_its_capacity(factor: float, policy: str) -> None:
    layer = make_layer(moe_expert_capacity_factor=factor, moe_token_drop_policy=policy)
    flat = tokens_of(0).reshape(-1, layer.config.hidden_size)
    kept = capacity_by_hand(layer.config, flat @ layer.router.weight.detach().t())
    assert 0 < kept.sum() < 2 * len(flat), "nothing was dropped, so this says nothing"
    assert_same_as_loop(layer, kept)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_auxiliary_losses_are_the_formula_by_hand(kind: str, score: str) -> None:
    layer = make_layer(
        moe_router_load_balancing_type=kind,
        moe_router_score_function=score,
        moe_aux_loss_coeff=0.3,
        moe_z_loss_coeff=0.1,
    )
    hidden = tokens_of(0)
    logits = hidden @ layer.router.weight.t()
    parts = logits.unbind(1) if kind == "seq_aux_loss" else [logits.flatten(0, 1)]
    balance = 0.3 * sum(balance_loss_by_hand(layer.config, part) for part in parts) / len(parts)
    z = 0.1 * torch.log(torch.exp(logits).sum(dim=-1)).square().mean()
    (expected,) = torch.autograd.grad(balance + z, [layer.router.weight])

    (layer(hidden) * 0.0).sum().backward()

    assert_close(kind, layer.router.losses[kind], balance.detach())
    assert_close("z loss", layer.router.losses["z_loss"], z.detach())
    assert_close("router", layer.router.weight.grad, expected)


def test_an_even_load_has_a_balancing_loss_of_one() -> None:
    layer = make_layer(moe_aux_loss_coeff=1.0, moe_router_topk=EXPERTS)
    layer.router.weight.data.zero_()
    layer(tokens_of(0))
    assert layer.router.losses["aux_loss"].item() == pytest.approx(1.0)

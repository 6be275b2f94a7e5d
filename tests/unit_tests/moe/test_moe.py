"""The mixture of experts on one process: against a Python loop over its tokens, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from core.groups.process_groups import ProcessGroups
from core.moe import MoELayer
from core.tensor_parallel import checkpoint as core_checkpoint
from tests.unit_tests.moe.moe_reference import (
    EXPERTS,
    HIDDEN,
    add_noise,
    assert_close,
    balance_loss_by_hand,
    capacity_by_hand,
    loop_over_tokens,
    make_config,
    route,
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


def check_grouped(layer: MoELayer, device: str, dtype: torch.dtype, rtol: float) -> None:
    """The one kernel's results are the loop's; it must have run."""
    layer = layer.to(device)
    hidden = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(1)).to(device, dtype).requires_grad_()
    params = [hidden, *layer.parameters()]
    results = []
    for grouped in (False, True):
        layer.config.moe_grouped_gemm = grouped
        assert layer.experts._can_group(hidden.flatten(0, 1)) == grouped
        output = layer(hidden)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), params)])
    for number, (want, have) in enumerate(zip(*results, strict=True)):
        error, scale = (have - want).abs().max().item(), want.abs().max().item()
        assert error <= rtol * scale and scale > 1e-5, f"{number}: off by {error}, largest value {scale}"


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped product")
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_one_grouped_product_is_the_loop_over_experts(activation: str) -> None:
    shape: dict[str, Any] = {"hidden_size": 8, "kv_channels": 2, "params_dtype": torch.float32}
    check_grouped(make_layer(activation=activation, **shape), "cpu", torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_one_grouped_product_is_the_loop_over_experts_on_a_gpu() -> None:
    shape: dict[str, Any] = {"hidden_size": 8, "kv_channels": 2, "params_dtype": torch.bfloat16}
    check_grouped(make_layer(**shape), "cuda", torch.bfloat16, 3e-2)


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_weights_are_the_same_in_every_dtype(dtype: torch.dtype) -> None:
    whole, layer = (MoELayer(make_config(params_dtype=d), name="mlp") for d in (torch.float32, dtype))
    for (name, param), expected in zip(layer.named_parameters(), whole.parameters(), strict=True):
        assert param.dtype == dtype and torch.equal(param, expected.to(dtype)), name


def test_the_bias_stays_in_fp32_when_the_model_does_not() -> None:
    layer = make_layer(**ROUTERS["sigmoid with bias"])
    before = layer.router.expert_bias.clone()
    layer.bfloat16()
    assert layer.router.weight.dtype == torch.bfloat16
    assert torch.equal(layer.router.expert_bias, before) and before.dtype == torch.float32
    assert layer(tokens_of(0).bfloat16()).dtype == torch.bfloat16
    assert "router.expert_bias" in layer.state_dict() and "router.local_tokens_per_expert" not in layer.state_dict()


@pytest.mark.parametrize("way", ["plain", "core's checkpoint", "torch's, reentrant", "torch's, not reentrant", "twice"])
def test_tokens_are_counted_once_however_often_the_layer_runs_in_a_step(way: str) -> None:
    layer = make_layer(**ROUTERS["sigmoid with bias"])
    hidden = tokens_of(0).requires_grad_()
    if way == "core's checkpoint":
        output = core_checkpoint(layer, False, hidden)
    elif way.startswith("torch's"):
        output = torch_checkpoint(layer, hidden, use_reentrant=way.endswith("s, reentrant"))
    else:
        output = layer(hidden)
    if way == "twice":  # two losses of one forward
        output.sum().backward(retain_graph=True)
    output.sum().backward()
    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    for token in hidden.detach().view(-1, HIDDEN):
        for expert, _ in route(layer.config, layer.router.weight @ token, layer.router.expert_bias):
            counts[expert] += 1
    assert counts.sum() > 0 and layer.router.local_tokens_per_expert.tolist() == counts.tolist()


def test_a_router_that_does_not_train_counts_its_tokens_too() -> None:
    layer = make_layer(**ROUTERS["sigmoid with bias"])
    layer.router.requires_grad_(False)
    layer(tokens_of(0)).sum().backward()
    assert layer.router.local_tokens_per_expert.sum() == tokens_of(0).numel() // HIDDEN * layer.config.moe_router_topk


def test_an_evaluation_counts_no_tokens_and_has_no_losses() -> None:
    layer = make_layer(moe_aux_loss_coeff=1.0, **ROUTERS["sigmoid with bias"])
    with torch.no_grad():
        layer(tokens_of(0))
    layer.eval()
    layer(tokens_of(0))
    assert layer.router.local_tokens_per_expert.sum() == 0 and not layer.router.losses

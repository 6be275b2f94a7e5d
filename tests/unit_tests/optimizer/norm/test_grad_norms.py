"""Norms of any p, and norms of their own for groups of parameters, in every layout, against counts by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.optimizer.norm.test_clip_grads import CASES, LAYOUTS, SIZES, ZEROS, Place, make_model
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, wrap

STRATEGIES = ("no_shard", "optim")
SEPARATE = {"expert": "experts", "embedding": "mtp"}  # parameter -> the norm group it is tagged with
TYPES = (1.0, 2.0, 3.5, math.inf)


def shape_of_gradient(name: str) -> torch.Tensor:
    """What every element's gradient is multiplied by: all different, of both signs, the first ones zero."""
    ramp = torch.linspace(0.5, 2.0, SIZES[name], dtype=torch.float64)
    ramp[::2] *= -1
    ramp[:ZEROS] = 0
    return ramp


def expected_norms(everyone: list[Place], norm_type: float, tags: dict[str, str]) -> dict[str | None, float]:
    """The norm of each group: parts of parameters that different ranks hold, each once."""
    parts: dict[tuple[Any, ...], tuple[str, float]] = {}
    for place in everyone:
        for name in SIZES:
            if place.holds(name):
                parts[place.part(name)] = (name, place.gradient(name, everyone))
    found: dict[str | None, float] = {group: 0.0 for group in (None, *tags.values())}
    for name, value in parts.values():
        magnitudes = shape_of_gradient(name).abs() * value
        group = tags.get(name)
        if math.isinf(norm_type):
            found[group] = max(found[group], magnitudes.max().item())
        else:
            found[group] += magnitudes.pow(norm_type).sum().item()
    return found if math.isinf(norm_type) else {group: total ** (1 / norm_type) for group, total in found.items()}


@ranks(4)
@pytest.mark.parametrize(("layout", "strategy"), [case for case in CASES if case[1] in STRATEGIES])
@pytest.mark.in_suite()
def test_norms_and_clipping_of_every_kind_in_every_layout(rank: int, world: int, layout: str, strategy: str) -> None:
    sizes = LAYOUTS[layout]
    instances = sizes.get("num_distributed_optimizer_instances", 1)
    parallel_state.initialize_model_parallel(**sizes)
    everyone = [Place(r, sizes) for r in range(world)]
    place = everyone[rank]
    for norm_type in TYPES:
        tags = SEPARATE if norm_type in (2.0, math.inf) else {}
        model = make_model(place)
        for name, group in tags.items():
            if place.holds(name):
                getattr(model, name).grad_norm_group = group
        ddp = wrap(
            model,
            data_parallel_sharding_strategy=strategy,
            num_distributed_optimizer_instances=instances,
            initial_weights="ignore",
            scale_in_optimizer=True,
        )
        config = OptimizerConfig(
            optimizer="sgd",
            sgd_momentum=0.0,
            lr=10.0,
            weight_decay=0.0,
            clip_grad=1.0,
            grad_norm_type=norm_type,
            log_num_zeros_in_grad=True,
            loss_scale=3.0,
        )
        optimizer = get_megatron_optimizer(config, [ddp])
        optimizer.zero_grad()
        losses = [(p * shape_of_gradient(n)).sum() * place.partial_gradient(n) for n, p in model.named_parameters()]
        optimizer.scale_loss(sum(losses)).backward()
        finalize_model_grads([ddp])
        want = expected_norms(everyone, norm_type, tags)
        assert optimizer.get_grad_norms() == pytest.approx(want, rel=1e-12)
        updated, norm, zeros = optimizer.step()
        assert updated and norm == pytest.approx(want[None], rel=1e-12)
        held = {p.part(name): name for p in everyone for name in SIZES if p.holds(name)}
        assert zeros == ZEROS * len(held)
        for name, param in model.named_parameters():
            true = shape_of_gradient(name) * place.gradient(name, everyone)
            expected = 1.0 - 10.0 * true / (want[tags.get(name)] + 1e-6)
            assert torch.allclose(param, expected, rtol=1e-10, atol=1e-12), name
            assert (param - 1).abs().max() > 1e-3


@ranks(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_norm_group_that_only_the_last_stage_holds(rank: int, world: int, strategy: str) -> None:
    """The other stages have never heard of it, and must take part in its sum."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    model = nn.Module()
    if rank > 0:
        model.register_parameter("weight", nn.Parameter(torch.ones(4, dtype=torch.float64)))
    if rank == 2:
        model.register_parameter("head", nn.Parameter(torch.ones(9, dtype=torch.float64)))
        model.head.grad_norm_group = "mtp"
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=1.0, weight_decay=0.0, clip_grad=1.0)
    optimizer = get_megatron_optimizer(config, [ddp])
    optimizer.zero_grad()
    ddp.reducer.note_forward()
    if rank > 0:
        sum(p.sum() * (10.0 if name == "head" else 2.0) for name, p in model.named_parameters()).backward()
    finalize_model_grads([ddp])
    assert optimizer.get_grad_norms() == {None: pytest.approx(32**0.5), "mtp": pytest.approx(30.0)}
    assert optimizer.step()[1] == pytest.approx(32**0.5)
    if rank > 0:
        assert model.weight.tolist() == pytest.approx([1 - 2 / 32**0.5] * 4, rel=1e-5)
    if rank == 2:
        assert model.head.tolist() == pytest.approx([1 - 10 / 30] * 9, rel=1e-5)


@ranks(2)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [1.0, math.inf])
def test_bad_gradients_are_seen_by_every_norm(rank: int, world: int, bad: float, norm_type: float) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), use_distributed_optimizer=True)
    options = {"lr": 0.1, "grad_norm_type": norm_type, "log_num_zeros_in_grad": True}
    optimizer = get_megatron_optimizer(OptimizerConfig(**options), [ddp])
    optimizer.zero_grad()
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    if rank == 1:
        bucket = ddp.grad_buffers[0].buckets[0]
        next(part for i in range(6) if (part := bucket.valid_part(i)).numel())[0] = bad
    assert optimizer.step() == (False, None, None)


@ranks(2)
def test_powers_that_overflow_fp32_are_no_reason_to_skip(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(torch.float32), use_distributed_optimizer=True)
    for norm_type in (2.0, 6.0, math.inf):
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, grad_norm_type=norm_type), [ddp])
        optimizer.zero_grad()
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        for masters in optimizer.masters:
            masters.grad.fill_(1e30)
        numel = sum(p.numel() for p in ddp.parameters())
        expected = 1e30 * (1.0 if math.isinf(norm_type) else numel ** (1 / norm_type))
        updated, norm, _ = optimizer.step()
        assert updated and norm == pytest.approx(expected, rel=1e-5)


def test_a_norm_needs_a_positive_p() -> None:
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match="grad_norm_type"):
            OptimizerConfig(grad_norm_type=bad)

"""core.optimizer.GradScaler: torch's loop with a dynamic loss scale, where gradients lie in shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.optimizer import GradScaler, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import batch, make_net

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
CLIP, STEPS, OVERFLOWS = 0.5, 6, (1, 4)
NUMBERS = {"init_scale": 2.0**12, "growth_interval": 2, "backoff_factor": 0.25, "growth_factor": 4.0}


def sharded(
    strategy: Any, dtype: torch.dtype = torch.float32, clip: float = CLIP, **options: Any
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=50
    )
    model = DistributedDataParallel(None, config, make_net(dtype))
    named = OptimizerConfig(optimizer="sgd", lr=0.3, sgd_momentum=0.9, weight_decay=0.0, clip_grad=clip, **options)
    return model, get_megatron_optimizer(named, [model])


def loss_of(model: Any, rank: int, step: int, autocast: bool = True) -> torch.Tensor:
    """In fp16 where autocast says so; the gradients of rank 1 overflow in some steps."""
    inputs, targets = batch(rank, step, torch.float32)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        outputs = model(inputs)
    loss = (outputs.float() - 3 * targets).square().mean()
    return loss * (torch.inf if rank == 1 and step in OVERFLOWS else 1.0)


def on_one_process(world: int) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """(weights after each step, the scale after each step) of torch's own scaler over the whole batch."""
    model = make_net(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", **NUMBERS)
    weights, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            scaler.scale(loss_of(model, rank, step) / world).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
        scales.append(scaler.get_scale())
    return weights, scales


@ranks(2)
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.in_suite()
def test_a_loop_with_a_dynamic_scale_trains_like_torchs_on_one_process(
    rank: int, world: int, strategy: str, unscales: bool
) -> None:
    parallel_state.initialize_model_parallel()
    model, optimizer = sharded(strategy)
    scaler = GradScaler("cpu", **NUMBERS)
    weights, scales = on_one_process(world)
    assert scales == [4096.0, 1024.0, 1024.0, 4096.0, 1024.0, 1024.0]
    start = make_net(torch.float32).state_dict()
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        finalize_model_grads([model])
        if unscales:
            scaler.unscale_(optimizer)
        if unscales and strategy == "no_shard":  # gradients are whole and unscaled: torch's habit works
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scales[step] and optimizer.step_was_skipped == (step in OVERFLOWS)
        with model.gathered():
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value, weights[step][name], atol=2e-4, rtol=0)
    assert optimizer.steps_skipped == len(OVERFLOWS)
    for name, value in weights[-1].items():
        assert (value - start[name]).abs().max() > 1e-2, f"{name} has hardly moved"


@ranks(2)
def test_the_state_of_the_scale_is_torchs(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model, optimizer = sharded("optim")
    scaler = GradScaler("cpu", **NUMBERS)
    for step in (0, 1, 2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        finalize_model_grads([model])
        scaler.step(optimizer)
        scaler.update()
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == 1024.0 and again.state_dict()["_growth_tracker"] == 1


@ranks(2)
def test_torchs_own_scaler_is_refused_by_name_and_one_that_is_off_is_not(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        model, optimizer = sharded(strategy)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, rank, 0)).backward()
        finalize_model_grads([model])
        with pytest.raises(TypeError, match="looks at one rank's gradients, .* use core.optimizer.GradScaler"):
            scaler.step(optimizer)
    model, optimizer = sharded("optim")
    for off in (torch.amp.GradScaler("cpu", enabled=False), GradScaler("cpu", enabled=False)):
        optimizer.zero_grad()
        off.scale(loss_of(model, rank, 0)).backward()
        finalize_model_grads([model])
        updated, _, _ = off.step(optimizer)
        off.update()
        assert updated


@ranks(2)
def test_what_would_be_scaled_wrongly_is_refused_by_name(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    scaler = GradScaler("cpu", **NUMBERS)
    model, optimizer = sharded("optim")
    with pytest.raises(Exception, match="its gradients are not reduced. Call finalize_model_grads"):
        scaler.scale(loss_of(model, rank, 0)).backward()
        scaler.unscale_(optimizer)
    finalize_model_grads([model])
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale_.. has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="step.. has already been called"):
        scaler.step(optimizer)
    scaler.update()
    for options, dtype, words in (
        ({"loss_scale": 8.0}, torch.float32, "already scales the loss"),
        ({"loss_scale": 1.0}, torch.float16, "already scales the loss"),
    ):
        model, optimizer = sharded("optim", dtype, **options)
        inputs, _ = batch(rank, 0, dtype)
        scaler.scale(model(inputs).float().sum()).backward()
        finalize_model_grads([model])
        with pytest.raises(ValueError, match=words):
            scaler.step(optimizer)


@ranks(2)
def test_a_torch_optimizer_over_whole_gradients_is_stepped_as_torch_does(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    model = DistributedDataParallel(None, config, make_net(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scaler = GradScaler("cpu", **NUMBERS)
    weights, scales = on_one_process(world)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        finalize_model_grads([model])
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scales[step]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[-1][name], atol=2e-4, rtol=0)

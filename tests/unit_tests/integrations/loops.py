"""What the adapters' tests share: the environment that a launcher gives, and the same training on one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from core.distributed import DistributedDataParallelConfig
from tests.unit_tests.reference import batch, make_net

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS, MICROBATCHES, MAX_NORM = 3, 2, 0.7


def config_of(strategy: Any) -> DistributedDataParallelConfig:
    """Several buckets, which leave in backward; the first rank's weights count."""
    return DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=50, initial_weights="broadcast"
    )


@contextlib.contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """What torchrun tells a rank, and libraries that keep the state of a job forget the test before."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}.items():
            patch.setenv(name, str(value))
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, str(world))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        _forget()
        try:
            yield
        finally:
            _forget()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, accelerate and Transformers see one process without torch.distributed, which the tests have started."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.delenv(name, raising=False)
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    with contextlib.suppress(ImportError):
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def loss_of(model: Any, rank: int, number: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The mean over four samples, other ones on every rank and in every microbatch."""
    inputs, targets = batch(rank, number, dtype)
    return 5 * (model(inputs) - 3 * targets).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, in two groups: a wrong scale shows, and so does a group that is lost."""
    params = list(model.parameters())
    groups = [{"params": params[:2], "lr": 0.2}, {"params": params[2:], "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def on_one_process(world: int, max_norm: float, steps: int = STEPS) -> tuple[nn.Module, list[float], list[float]]:
    """(the model, each step's mean loss, each step's norm before clipping) of the same steps, in fp64."""
    model = make_net(torch.float64)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for rank in range(world):
            for part in range(MICROBATCHES):
                total = total + loss_of(model, rank, MICROBATCHES * step + part) / (world * MICROBATCHES)
        total.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        scheduler.step()
        losses.append(total.item())
    return model, losses, norms


def assert_equal_weights(found: dict[str, torch.Tensor], expected: nn.Module, bound: float = 1e-9) -> None:
    """Every weight is the reference's, which has moved far more than the bound."""
    start = make_net(torch.float64).state_dict()
    wanted = expected.state_dict()
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert (value - start[name]).abs().max() > 1e4 * bound, f"{name} has hardly moved"
        away = (found[name].double() - value).abs().max()
        assert away <= bound, f"{name} is {away} away"

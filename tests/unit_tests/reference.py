"""The independent reference of the engine's tests: one process, no splitting, fp64, a Python loop over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

LossOf = Callable[[nn.Module, int, int], torch.Tensor]  # (model, rank, microbatch) -> this rank's loss


class Net(nn.Module):
    """Uneven sizes on purpose: no dimension is a multiple of anything."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, 11, bias=False)
        self.third = nn.Linear(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))


def make_net(dtype: torch.dtype = torch.float64, seed: int = 3, width: int = 7) -> Net:
    """The same network on every rank."""
    torch.manual_seed(seed)
    return Net(width).to(dtype)


def batch(rank: int, microbatch: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Different data on every rank and in every microbatch."""
    generator = torch.Generator().manual_seed(1000 * rank + microbatch + 17)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def loss_of(model: nn.Module, rank: int, microbatch: int) -> torch.Tensor:
    """A loss whose gradient is of the order of one in every parameter."""
    dtype = next(model.parameters()).dtype
    x, y = batch(rank, microbatch, dtype)
    return (model(x) - y).pow(2).sum() * (rank + 1)


def train(ddp: DistributedDataParallel, optimizer: Any, rank: int, *microbatches: int) -> None:
    """A step on each of some microbatches, all of which are made."""
    for microbatch in microbatches:
        optimizer.zero_grad()
        loss_of(ddp, rank, microbatch).backward()
        finalize_model_grads([ddp])
        assert optimizer.step()[0]


def mean_over_ranks(
    model: nn.Module, world: int, microbatches: Sequence[int] = (0,), loss: LossOf = loss_of
) -> dict[str, torch.Tensor]:
    """Gradients by name: the sum over microbatches, the mean over ranks, added up on one process in fp64."""
    reference = copy.deepcopy(model).double()
    for param in reference.parameters():
        param.grad = None
    for rank in range(world):
        for microbatch in microbatches:
            value = loss(reference, rank, microbatch)
            if value.requires_grad:
                (value / world).backward()
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad.clone()
        for name, param in reference.named_parameters()
    }


def wrap(
    model: nn.Module, config: Any = None, *, disable_bucketing: bool = False, pg_collection: Any = None, **options: Any
) -> DistributedDataParallel:
    """DistributedDataParallel with its config's fields as keywords."""
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(**options), model, disable_bucketing, pg_collection=pg_collection
    )


def wrap_unwatched(model: nn.Module, config: Any = None, **options: Any) -> DistributedDataParallel:
    """`wrap` for gradients that a test makes, so that those of copies differ between ranks."""
    return wrap(model, config, first_steps="ignore", **options)


def whole_grads(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Every reduced gradient by name; where they are sharded, put together from all ranks' shards. Collective."""
    grads = {}
    for buffer in (*ddp.grad_buffers, *ddp.expert_parallel_buffers):
        for bucket in buffer.buckets:
            flat = bucket.valid_grad.clone()
            if not bucket.step.is_full_grad:
                shards = [torch.empty_like(flat) for _ in range(dist.get_world_size(bucket.groups.shard))]
                dist.all_gather(shards, flat, group=bucket.groups.shard)
                flat = torch.cat(shards)
            for slot in bucket.layout.slots:
                start = slot.start - bucket.layout.start
                grads[slot.name] = flat[start : start + slot.end - slot.start].view(slot.shape)
    return grads


def assert_same(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, rtol: float = 1e-10, moved: bool = True
) -> None:
    """Compare by name, relative to each gradient's norm; and the reference must be far from zero."""
    assert got.keys() == expected.keys(), f"{sorted(got)} is not {sorted(expected)}"
    for name, want in expected.items():
        have = got[name].double()
        scale = want.norm().item()
        error = (have - want).norm().item()
        assert error <= rtol * max(scale, 1e-300) or (scale == 0 and error == 0), (
            f"{name}: off by {error / scale if scale else error:.3g} relative; "
            f"ratio of norms {have.norm().item() / scale if scale else float('nan'):.6g}"
        )
    if moved:
        assert sum(want.norm().item() for want in expected.values()) > 1e-3, "the reference itself is zero"


def check_steps(
    ddp: DistributedDataParallel,
    plain: nn.Module,
    rank: int,
    world: int,
    steps: int,
    loss: LossOf,
    *,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    rtol: float = 1e-10,
) -> None:
    """Run `steps` steps with new data in each, and compare all gradients of each with the one-process reference.

    plain: a copy of the wrapped model that was made before wrapping, with the same weights.
    """
    for step in range(steps):
        ddp.zero_grad_buffer()
        value = loss(ddp, rank, step)
        if value.requires_grad:
            backward(value)
        finalize_model_grads([ddp])
        try:
            assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (step,), loss), rtol=rtol)
        except AssertionError as error:
            raise AssertionError(f"step {step}: {error}") from error

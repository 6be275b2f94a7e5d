"""Arms of torch itself, and marks to read the table by: no communication, one all-reduce, wrong gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.arms import BETAS, EPS, LR, WEIGHT_DECAY, Arm, Microbatch, Step
from benchmarks.workloads import Workload

ADAM: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "fused": True}


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """The optimizer of every arm that takes torch's."""
    return torch.optim.AdamW(params, **ADAM)


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | ShardedSketch,
    *,
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
    reduce: Callable[[], None] | None = None,
    set_to_none: bool = True,
) -> Step:
    """A training loop's step; all microbatches but the last run under `no_sync`."""

    def step(microbatches: Sequence[Microbatch]) -> float:
        optimizer.zero_grad(set_to_none=set_to_none)
        total = 0.0
        for number, (inputs, targets) in enumerate(microbatches, start=1):
            with no_sync() if number < len(microbatches) else nullcontext():
                loss = model(inputs, targets)
                (loss / len(microbatches)).backward()
            total += loss.item()
        if reduce is not None:
            reduce()
        optimizer.step()
        return total / len(microbatches)

    return step


def one_process(workload: Workload, ranks: int, accumulation: int, *, set_to_none: bool = True) -> Step:
    """No communication; in one process that gets the microbatches of all ranks, what the others must agree with."""
    model = workload.model()
    return plain_step(model, adamw(model.parameters()), set_to_none=set_to_none)


def flat_all_reduce(workload: Workload, ranks: int, accumulation: int) -> Step:
    """Gradients are views of one buffer, which one all-reduce sums after backward."""
    model = workload.model()
    buffer = flat_gradients(model)

    def reduce() -> None:
        dist.all_reduce(buffer)
        buffer.div_(ranks)

    return plain_step(model, adamw(model.parameters()), reduce=reduce, set_to_none=False)


def flat_gradients(model: nn.Module, multiple_of: int = 1) -> torch.Tensor:
    """One zeroed buffer of which all gradients are views, and at its end so much that its length is a multiple."""
    params = list(model.parameters())
    sizes = [param.numel() for param in params]
    padding = -sum(sizes) % multiple_of
    buffer = torch.zeros(sum(sizes) + padding)
    for param, view in zip(params, buffer.split([*sizes, padding]), strict=False):
        param.grad = view.view_as(param)
    return buffer


class ShardedSketch:
    """The optimizer that one would write oneself: each rank adds up, steps and sends round its part of flat buffers.

    Gradients go pairwise to the rank that owns them, and broadcasts bring its weights back; AdamW has one tensor, the
    part. All of it after backward.
    """

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.rank, self.ranks = dist.get_rank(), ranks
        self.grads = flat_gradients(model, ranks)
        self.weights = torch.zeros_like(self.grads)
        begin = 0
        for param in model.parameters():
            view = self.weights[begin : begin + param.numel()].view_as(param)
            begin += param.numel()
            param.data = view.copy_(param.data)
        self.parts, self.grad_parts = self.weights.chunk(ranks), self.grads.chunk(ranks)
        self.received = torch.empty(ranks - 1, self.grads.numel() // ranks)
        shard = nn.Parameter(self.parts[self.rank])
        shard.grad = self.grad_parts[self.rank]
        self.adam = adamw([shard])

    def zero_grad(self, set_to_none: bool = False) -> None:
        """All gradients; they are never freed."""
        self.grads.zero_()

    def step(self) -> None:
        """Reduce to parts, update this rank's, gather all."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        works = [dist.irecv(into, rank) for into, rank in zip(self.received, others, strict=True)]
        works += [dist.isend(self.grad_parts[rank], rank) for rank in others]
        for work in works:
            work.wait()
        mean = self.grad_parts[self.rank]
        for part in self.received:
            mean.add_(part)
        mean.div_(self.ranks)
        self.adam.step()
        for work in [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(self.parts)]:
            work.wait()


def sharded_sketch(workload: Workload, ranks: int, accumulation: int) -> Step:
    """ShardedSketch around a plain model."""
    model = workload.model()
    return plain_step(model, ShardedSketch(model, ranks), set_to_none=False)


def ddp(workload: Workload, ranks: int, accumulation: int, *, zero: bool = False, **options: Any) -> Step:
    """DistributedDataParallel with `options`, and AdamW or ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    if accumulation > 1:
        options.pop("static_graph", None)  # torch 2.13 fails on it when the first backward is inside no_sync
    model = DistributedDataParallel(workload.model(), **options)
    if zero:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **ADAM
        )
    else:
        optimizer = adamw(model.parameters())
    return plain_step(model, optimizer, no_sync=model.no_sync)


def fsdp2(workload: Workload, ranks: int, accumulation: int, *, reshard: bool) -> Step:
    """fully_shard on every unit and on the rest; gradients are reduced in every microbatch, FSDP2's default."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = workload.model()
    mesh = init_device_mesh("cpu", (ranks,))
    for unit in model.units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return plain_step(model, adamw(model.parameters()))


def wrong(workload: Workload, ranks: int, accumulation: int, *, reduce: Callable[[torch.Tensor], None]) -> Step:
    """A control: what `reduce` does to every gradient does not make it the mean over ranks."""
    model = workload.model()

    def reduce_all() -> None:
        for param in model.parameters():
            if param.grad is not None:
                reduce(param.grad)

    return plain_step(model, adamw(model.parameters()), reduce=reduce_all)


def _leave(gradient: torch.Tensor) -> None:
    """Every rank keeps its own gradients."""


def _sum(gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient)


REFERENCE = Arm("one process", "the global batch in one process", "none", one_process, "reference")
BASELINE = "torch ddp"
DDP_IMPORTS = ("torch.distributed.optim",)  # what DistributedDataParallel imports while it is made

ARMS = (
    REFERENCE,
    Arm(
        "control: own gradients", "gradients are not averaged at all", "none", partial(wrong, reduce=_leave), "control"
    ),
    Arm("control: sum for mean", "gradients are added, not averaged", "none", partial(wrong, reduce=_sum), "control"),
    Arm("no communication", "each rank trains alone", "none", one_process, "floor"),
    Arm(
        "no communication, kept",
        "gradients are zeroed and not freed between steps, as in any buffer",
        "none",
        partial(one_process, set_to_none=False),
        "floor",
    ),
    Arm("flat all-reduce", "one gradient buffer, one all_reduce after backward", "no_shard", flat_all_reduce),
    Arm(BASELINE, "DistributedDataParallel at its defaults", "no_shard", ddp, imports=DDP_IMPORTS),
    Arm(
        "torch ddp views",
        "gradient_as_bucket_view=True, static_graph=True without accumulation",
        "no_shard",
        partial(ddp, gradient_as_bucket_view=True, static_graph=True),
        imports=DDP_IMPORTS,
    ),
    Arm(
        "torch zero1",
        "gradient_as_bucket_view=True, ZeroRedundancyOptimizer(parameters_as_bucket_view=True)",
        "optim",
        partial(ddp, zero=True, gradient_as_bucket_view=True),
        imports=DDP_IMPORTS,
    ),
    Arm(
        "sketch",
        "flat buffers, pairwise reduce-scatter, one fused AdamW on the part, broadcasts back; no overlap",
        "optim",
        sharded_sketch,
    ),
    Arm("fsdp2 kept", "reshard_after_forward=False", "optim_grads", partial(fsdp2, reshard=False)),
    Arm("fsdp2 resharded", "reshard_after_forward=True", "optim_grads_params", partial(fsdp2, reshard=True)),
)

"""What torch itself offers, and marks to read the table by: no communication, one all-reduce, wrong gradients."""

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
    optimizer: torch.optim.Optimizer,
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
    params = list(model.parameters())
    sizes = [param.numel() for param in params]
    buffer = torch.zeros(sum(sizes))
    for param, view in zip(params, buffer.split(sizes), strict=True):
        param.grad = view.view_as(param)

    def reduce() -> None:
        dist.all_reduce(buffer)
        buffer.div_(ranks)

    return plain_step(model, adamw(params), reduce=reduce, set_to_none=False)


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

ARMS = (
    REFERENCE,
    Arm(
        "control: own gradients", "gradients are not averaged at all", "none", partial(wrong, reduce=_leave), "control"
    ),
    Arm("control: sum for mean", "gradients are added, not averaged", "none", partial(wrong, reduce=_sum), "control"),
    Arm("no communication", "each rank trains by itself", "none", one_process, "floor"),
    Arm(
        "no communication, kept",
        "gradients are zeroed and not freed between steps, as in any buffer",
        "none",
        partial(one_process, set_to_none=False),
        "floor",
    ),
    Arm("flat all-reduce", "one gradient buffer, one all_reduce after backward", "no_shard", flat_all_reduce),
    Arm(BASELINE, "DistributedDataParallel at its defaults", "no_shard", ddp),
    Arm(
        "torch ddp views",
        "gradient_as_bucket_view=True, static_graph=True without accumulation",
        "no_shard",
        partial(ddp, gradient_as_bucket_view=True, static_graph=True),
    ),
    Arm(
        "torch zero1",
        "gradient_as_bucket_view=True, ZeroRedundancyOptimizer(parameters_as_bucket_view=True)",
        "optim",
        partial(ddp, zero=True, gradient_as_bucket_view=True),
    ),
    Arm("fsdp2 kept", "reshard_after_forward=False", "optim_grads", partial(fsdp2, reshard=False)),
    Arm("fsdp2 resharded", "reshard_after_forward=True", "optim_grads_params", partial(fsdp2, reshard=True)),
)

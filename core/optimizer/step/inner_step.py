"""One call of the inner optimizer over some of its runs, with everything their gradients must still be multiplied by.

Data average, tokens, loss scale and clip coefficient have become one number by now. torch's fused kernels take it and
multiply while they read; for other algorithms one foreach pass does it, in scratch where the gradients are there. torch
hands its kernels the inverse, in fp32 (`grad_scale`, which is there for its own loss scaling).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from core.optimizer.masters.master_weights import Run

SMALLEST, LARGEST = 2.0**-120, 2.0**120  # factors beyond are applied in two halves, as fp32 could not hold them


def step_runs(optimizer: torch.optim.Optimizer, runs: Sequence[Run], factors: Sequence[float]) -> None:
    """Step the masters of these runs, and no other's.

    factors: what each run's gradients in memory are multiplied by to be those that the algorithm shall see.
    """
    if not runs:
        return
    common = _apply(runs, factors, by_kernel=takes_grad_scale(optimizer, runs))
    for run in runs:
        run.master.grad = run.grad
    if common != 1.0:
        optimizer.grad_scale = torch.full((), 1.0 / common, dtype=torch.float32, device=runs[0].grad.device)
    try:
        step_only(optimizer, runs)
    finally:
        if common != 1.0:
            optimizer.grad_scale = None


def takes_grad_scale(optimizer: torch.optim.Optimizer, runs: Sequence[Run]) -> bool:
    """Do the optimizer's kernels divide by a `grad_scale`? Not where gradients are fp64: it is an fp32 number."""
    known = getattr(optimizer, "_step_supports_amp_scaling", False)
    return known and all(run.grad.dtype == torch.float32 for run in runs)


def step_only(optimizer: torch.optim.Optimizer, runs: Sequence[Run]) -> None:
    """`optimizer.step()` as if it held the masters of these runs alone.

    Runs that step for the first time go first and alone: torch's fused SGD cannot mix momentum that is there and not.
    """
    fresh: list[Run] = []
    known: list[Run] = []
    for run in runs:
        (known if optimizer.state.get(run.master) else fresh).append(run)
    if fresh and known:
        step_only(optimizer, fresh)
        runs = known
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    for group in groups:
        group["params"] = []
    for run in runs:
        groups[run.group]["params"].append(run.master)
    try:
        optimizer.step()
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


def _apply(runs: Sequence[Run], factors: Sequence[float], *, by_kernel: bool) -> float:
    """Multiply gradients by their factors, all but the one that the kernel can apply; returns that."""
    common = factors[0] if by_kernel and SMALLEST < abs(factors[0]) < LARGEST else 1.0
    for factor in set(factors) - {common}:
        _multiply([run.grad for run, other in zip(runs, factors, strict=True) if other == factor], factor / common)
    return common


def _multiply(grads: list[torch.Tensor], factor: float) -> None:
    if SMALLEST < abs(factor) < LARGEST or factor == 0:
        torch._foreach_mul_(grads, factor)
        return
    half = math.sqrt(factor)
    torch._foreach_mul_(grads, half)
    torch._foreach_mul_(grads, half)

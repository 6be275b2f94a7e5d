"""torch's fused Adam kernel for the CPU, called for some runs as `optimizer.step()` would call it for them.

`optimizer.step()` groups tensors, reads options and looks for hooks before it reaches its kernel: some 0.1 ms a call
once the cache holds something else. A bucket that is stepped in pieces makes some 40 such calls for 10 million
elements, and a small shard makes one. So the kernel is called here with the same tensors and numbers, and the bits are
the same. Where `step()` may do more than call it (a hook, a subclass, another algorithm, the state's first step),
`step()` it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from core.distributed.guard.step_guard import is_guard
from core.optimizer.masters.master_weights import Run
from core.optimizer.masters.stored_values import ParameterValues, PlainValues

MOMENTS = ("exp_avg", "exp_avg_sq")


def plain_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Is `optimizer.step()` nothing but torch's fused Adam? Asked in each step: hooks come and go."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or "step" in vars(optimizer):
        return False  # a scheduler of torch puts its own `step` on the object
    hooks = (
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    )
    return all(map(is_guard, hooks)) and all(map(_plain_group, optimizer.param_groups))


def _plain_group(group: dict[str, Any]) -> bool:
    special = group["amsgrad"] or group["capturable"] or group["differentiable"]
    return bool(group["fused"]) and not special and not isinstance(group["lr"], torch.Tensor)


def step_by_kernel(optimizer: torch.optim.Optimizer, runs: Sequence[Run], grad_scale: torch.Tensor | None) -> bool:
    """Step the masters of these runs of a `plain_fused_adam`; False, with nothing done, where `step()` has to.

    grad_scale: what the kernel divides gradients by.
    """
    if not all(_on_cpu_and_begun(optimizer, run) for run in runs):
        return False
    for index in {run.group for run in runs}:
        mine = [run for run in runs if run.group == index]
        states = [optimizer.state[run.master] for run in mine]
        call_kernel(
            optimizer.param_groups[index],
            [run.master for run in mine],
            [run.grad for run in mine],
            [[state[key] for state in states] for key in MOMENTS],
            [state["step"] for state in states],
            grad_scale,
        )
    return True


def _on_cpu_and_begun(optimizer: torch.optim.Optimizer, run: Run) -> bool:
    return run.master.is_cpu and run.master.dtype == run.grad.dtype and "exp_avg" in optimizer.state.get(run.master, ())


def step_where_kept(
    optimizer: torch.optim.Optimizer, runs: Sequence[Run], grad_scale: torch.Tensor | None
) -> list[Run]:
    """Step runs that are kept in one 16-bit dtype throughout where they lie; returns those that have to be unpacked.

    The kernel then converts each vector as it comes: the same fp32 numbers, rounded once, as by way of scratch memory.
    """
    here: list[Run] = []
    left: list[Run] = []
    for run in runs:
        (here if _of_one_dtype(optimizer, run) else left).append(run)
    for index in {run.group for run in here}:
        mine = [run for run in here if run.group == index]
        call_kernel(
            optimizer.param_groups[index],
            [run.home.memory for run in mine],  # type: ignore[union-attr]
            [run.reduced for run in mine],
            [[run.moments[key].data for run in mine] for key in MOMENTS],  # type: ignore[attr-defined]
            [optimizer.state[run.master]["step"] for run in mine],
            grad_scale,
        )
    return left


def _of_one_dtype(optimizer: torch.optim.Optimizer, run: Run) -> bool:
    """Are parameter, gradient and both moments numbers of one dtype, one after the other?"""
    if type(run.home) is not ParameterValues or run.home.memory is None or not run.reduced.is_cpu:
        return False
    kept = [run.moments.get(key) for key in MOMENTS]
    found = {values.data.dtype if type(values) is PlainValues else None for values in kept}
    return found == {run.reduced.dtype} == {run.home.memory.dtype} and run.master in optimizer.state


def call_kernel(
    group: dict[str, Any],
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    moments: Sequence[list[torch.Tensor]],
    steps: list[torch.Tensor],
    grad_scale: torch.Tensor | None,
) -> None:
    """One call for tensors of one param group, each with its own step count."""
    beta1, beta2 = group["betas"]
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    torch._foreach_add_(steps, 1)
    kernel(
        params,
        grads,
        *moments,
        [],
        steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
        grad_scale=grad_scale,
        found_inf=None,
    )

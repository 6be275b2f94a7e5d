"""OnePassAdam: Adam whose step reads and writes each element once, whatever it is kept in (optimizer_backend="triton").

torch's fused kernels step full-precision tensors. What is kept otherwise takes further passes around them: a factor of
the gradients is written back into them, a 16-bit parameter is copied from its master, and 16-bit gradients, moments and
masters go through scratch. Here a bucket's run is one launch of one kernel (triton_adam.py), which does all of that
while an element is in a register.

Buckets whose parameters cannot lie in one tensor, and masters in fp16 with a scale (a scale needs the largest of all
numbers before the first may be written), are stepped by the same kernel through the usual passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version

from core.optimizer.algorithms.kernel_adam import KernelAdam
from core.optimizer.masters.master_weights import BucketMasters, Home, Run
from core.optimizer.masters.scratch import Scratch, kept_dtype
from core.optimizer.masters.stored_values import CopiedValues, PlainValues, RemainderValues
from core.optimizer.step.inner_step import LARGEST, SMALLEST

MOMENTS = ("exp_avg", "exp_avg_sq")

Factors = Mapping[str | None, float]  # norm group -> what gradients in memory are multiplied by


@dataclass(frozen=True, slots=True)
class AdamNumbers:
    """What is the same for all elements of a step.

    factors: the gradient is multiplied by both; two, as their product need not be an fp32 number. step: counted from 1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int
    factors: tuple[float, float] = (1.0, 1.0)


class AdamKernel(Protocol):
    """triton_adam.adam: gradient, parameter, master (None: the parameter), both moments, numbers; in place."""

    def __call__(
        self,
        grad: torch.Tensor,
        param: torch.Tensor,
        master: torch.Tensor | None,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        numbers: AdamNumbers,
    ) -> None: ...


def in_two(factor: float) -> tuple[float, float]:
    """Two fp32 numbers whose product is the factor, one of them 1 where that does."""
    if factor == 0 or SMALLEST < abs(factor) < LARGEST:
        return factor, 1.0
    root = math.sqrt(abs(factor))
    return math.copysign(root, factor), root


class OnePassAdam(KernelAdam):
    """Adam and AdamW with torch's state and formulas, over masters like any other and over whole buckets at once."""

    kernel: Any  # an AdamKernel

    def _call(self, group: dict[str, Any], device: torch.device, count: int, params: list[torch.Tensor]) -> None:
        """The usual step: masters and gradients in fp32, one launch a tensor."""
        for param in params:
            if not param.is_contiguous():
                raise ValueError(f"a master of shape {list(param.shape)} has strides {param.stride()}, not contiguous")
            state = self.state[param]
            assert param.grad is not None, "KernelAdam.step lists parameters with a gradient"
            moments = [state[key].view(-1) for key in MOMENTS]
            grad = param.grad.contiguous().view(-1)
            self.kernel(grad, param.detach().view(-1), None, *moments, self._numbers(group, count, 1.0))
        increment_version(params)

    @torch.no_grad()
    def step_buckets(
        self, buckets: Sequence[BucketMasters], factors: Sequence[Factors], scratch: Scratch
    ) -> tuple[list[BucketMasters], list[Factors]]:
        """Step the buckets that one pass can step, parameters included; returns the others with their factors."""
        left: list[tuple[BucketMasters, Factors]] = []
        for masters, factor in zip(buckets, factors, strict=True):
            if not takes(masters):
                left.append((masters, factor))
                continue
            for run in masters.runs:
                if run.live:
                    self._step_run(masters, run, factor[run.norm_group], scratch)
            if masters.flat is not None:
                masters.flat.note_written()
        return [masters for masters, _ in left], [factor for _, factor in left]

    def _step_run(self, masters: BucketMasters, run: Run, factor: float, scratch: Scratch) -> None:
        group, state = self.param_groups[run.group], self.state[run.master]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key in MOMENTS:
                here = kept_dtype(key, scratch.config) is None
                state[key] = torch.zeros_like(run.master) if here else scratch.adopt(run, key, run.master.data)
        state["step"] += 1
        moments = [run.moments[key].data if key in run.moments else state[key].view(-1) for key in MOMENTS]  # type: ignore[attr-defined]
        numbers = self._numbers(group, int(state["step"]), factor)
        param, master = param_and_master(masters, run)
        self.kernel(run.reduced, param, master, *moments, numbers)

    def _numbers(self, group: dict[str, Any], count: int, factor: float) -> AdamNumbers:
        beta1, beta2 = group["betas"]
        return AdamNumbers(
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self.decoupled_weight_decay,
            step=count,
            factors=in_two(factor),
        )


def takes(masters: BucketMasters) -> bool:
    """Can a bucket be stepped in one pass?"""
    if masters.param_data is None or masters.dtype != torch.float32:
        return False
    homes = (run.home for run in masters.runs)
    return not any(isinstance(home, CopiedValues) and not isinstance(home.values, PlainValues) for home in homes)


def param_and_master(masters: BucketMasters, run: Run) -> tuple[torch.Tensor, torch.Tensor | None]:
    """([numel] of the model's parameters, the master as `AdamKernel` wants it) of a run of a bucket that `takes`."""
    assert masters.param_data is not None, "see takes"
    here = slice(run.start, run.start + run.numel)
    param = masters.param_data[here]
    if masters.main is not None:
        return param, masters.main[here]
    if isinstance(run.home, RemainderValues):
        return param, run.home.remainder
    if isinstance(run.home, CopiedValues):
        assert isinstance(run.home.values, PlainValues), "see takes"
        return param, run.home.values.data
    assert masters.home is Home.PARAMETER, f"no kernel for masters in {masters.home.value}"
    return param, None

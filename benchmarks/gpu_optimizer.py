"""The optimizer's step on a device: torch's fused AdamW with passes around it, and ours, in shares of a copy.

Arms, numbers and the bytes that must move are those of `python -m benchmarks optimizer`; here they lie on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.optimizer_arms import (
    BETAS,
    CLIP,
    EPS,
    INT16,
    LR,
    PRECISIONS,
    WEIGHT_DECAY,
    AdamNumbers,
    CoreArm,
    Precision,
    Problem,
    StepArm,
    TorchArm,
    check_weights,
)
from benchmarks.optimizer_step import CHECKED_STEPS, TOLERANCES
from benchmarks.workloads import Workload

NAMES = ("fp32", "bf16, fp32 gradients and masters", "bf16, bf16 gradients, remainders",
         "bf16, bf16 gradients and moments, remainders")  # fmt: skip
COPY = "copy"
TORCH = "torch fused AdamW, flat, clipped"
TRITON = "Triton, one pass"
Kernel = Callable[..., None]


@dataclass(frozen=True)
class DeviceProblem(Problem):
    """A Problem whose numbers, the same ones, lie on a device."""

    device: torch.device = torch.device("cpu")

    def values(self, what: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Drawn on the CPU, so that they are equal everywhere."""
        with torch.device("cpu"):
            drawn = super().values(what, dtype)
        return [value.to(self.device) for value in drawn]


def problem_of(workload: Workload, precision: str, device: torch.device) -> DeviceProblem:
    """All parameters of a workload."""
    with torch.device("meta"):
        shapes = tuple(tuple(param.shape) for param in workload.model().parameters())
    return DeviceProblem(shapes, PRECISIONS[precision], device)


def with_backend(problem: DeviceProblem, backend: str) -> DeviceProblem:
    """The same under an `optimizer_backend`."""
    precision: Precision = problem.precision
    return replace(problem, precision=replace(precision, options={**precision.options, "optimizer_backend": backend}))


def triton_kernel(device: torch.device) -> Kernel | None:
    """benchmarks.triton_adam.adam; None where Triton is not installed or does not run on this device."""
    try:
        from benchmarks import triton_adam
    except ImportError:
        return None
    return triton_adam.adam if device.type == "cuda" or triton_adam.is_interpreted() else None


class TritonArm(StepArm):
    """The candidate kernel over flat tensors: the norm is one pass, and the step is another.

    kernel: in place, with gradient, parameter, master (None: the parameter), both moments and AdamNumbers.
    """

    def __init__(self, problem: DeviceProblem, kernel: Kernel) -> None:
        self.kernel = kernel
        precision = problem.precision
        values = problem.values(0, precision.param)
        flat = torch.cat([value.reshape(-1) for value in values])
        self.flat = flat
        parts = flat.split([value.numel() for value in values])
        self.parts = [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
        self.master: torch.Tensor | None = None
        if precision.master is not None:  # a remainder of 0: the master is the parameter
            self.master = (
                torch.zeros_like(flat, dtype=INT16) if precision.master == INT16 else flat.to(precision.master)
            )
        self.grad = torch.zeros_like(flat, dtype=precision.grad)
        self.moments = [torch.zeros_like(flat, dtype=precision.moment) for _ in range(2)]
        self.steps = 0

    def prepare(self, grads: Sequence[torch.Tensor]) -> None:
        self.grad.copy_(torch.cat([grad.reshape(-1) for grad in grads]))

    def step(self) -> None:
        norm = torch.linalg.vector_norm(self.grad, dtype=torch.float32).item()
        self.steps += 1
        factor = min(1.0, CLIP / (norm + 1e-6))
        numbers = AdamNumbers(LR, *BETAS, EPS, WEIGHT_DECAY, True, self.steps, (factor, 1.0))
        self.kernel(self.grad, self.flat, self.master, *self.moments, numbers)

    def weights(self) -> list[torch.Tensor]:
        return self.parts


def makers(kernel: Kernel | None) -> dict[str, Callable[[DeviceProblem], StepArm]]:
    """Makers of the arms; all clip, so that there is a factor to multiply by. kernel: see `triton_kernel`."""
    arms: dict[str, Callable[[DeviceProblem], StepArm]] = {
        TORCH: lambda problem: TorchArm(problem, flat=True, clipped=True),
        "core fused": lambda problem: CoreArm(with_backend(problem, "fused"), strategy="no_shard", clipped=True),
    }
    if kernel is not None:
        arms[TRITON] = lambda problem: TritonArm(problem, kernel)
    return arms


def made(problem: DeviceProblem, make: Callable[[DeviceProblem], StepArm]) -> StepArm:
    """An arm whose own tensors lie on the problem's device too."""
    with torch.device(problem.device):
        return make(problem)


def reference(problem: DeviceProblem) -> list[torch.Tensor]:
    """torch's weights after the first steps, on the CPU."""
    on_cpu = replace(problem, device=torch.device("cpu"))
    return after_first_steps(on_cpu, made(on_cpu, makers(None)[TORCH]))


def after_first_steps(problem: DeviceProblem, arm: StepArm) -> list[torch.Tensor]:
    """The arm's weights on the CPU."""
    for number in range(CHECKED_STEPS):
        arm.prepare(problem.gradients(number))
        arm.step()
    return [weight.cpu() for weight in arm.weights()]


def checked(problem: DeviceProblem, arms: dict[str, Callable[[DeviceProblem], StepArm]]) -> dict[str, StepArm]:
    """All arms after their first steps; raises WrongWeights for one that has others than torch's on the CPU."""
    start = [value.cpu() for value in problem.values(0, problem.precision.param)]
    want = reference(problem)
    tolerance = TOLERANCES[problem.precision.param]
    if problem.precision.moment != torch.float32:
        tolerance *= 2
    found = {}
    for name, make in arms.items():
        found[name] = made(problem, make)
        check_weights(name, after_first_steps(problem, found[name]), want, start, tolerance)
    return found


def share_of_copy(problem: DeviceProblem, seconds: float, copy_seconds: float) -> float:
    """Bytes that a clipped step must move over its time, over those of a copy of as many fp32 numbers."""
    moved = problem.precision.bytes_per_element(clipped=True)
    return (moved / seconds) / (2 * torch.float32.itemsize / copy_seconds)


def calls_of(
    problem: DeviceProblem, arms: dict[str, StepArm]
) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """The timed functions by name, first a copy between kept buffers; and those that give gradients before each."""
    source = torch.ones(problem.numel, device=problem.device)
    target = torch.zeros(problem.numel, device=problem.device)
    grads = problem.gradients(CHECKED_STEPS)
    calls: dict[str, Callable[[], Any]] = {COPY: lambda: target.copy_(source)}
    before: dict[str, Callable[[], Any]] = {}
    for name, arm in arms.items():
        calls[name] = arm.step
        before[name] = partial(arm.prepare, grads)
    return calls, before

"""Learning rate schedulers by ColossalAI's names. Most are a formula of the step and the group's own rate.

Step t is the number of calls of `step()` so far; the rate of step 0 is set when the scheduler is made. An optimizer
that `boost` returned may be given as well as the torch optimizer in it. A keyword that a schedule does not have is a
TypeError; ColossalAI drops it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch.optim import lr_scheduler

from core.interface import OptimizerWrapper


class FormulaLR(lr_scheduler.LRScheduler):
    """A schedule with `lr_at(step, base)`, in which step 0 follows the warm-up: linear from base / warmup_steps."""

    def __init__(self, optimizer: Any, total_steps: int, warmup_steps: int, last_epoch: int) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(
                f"{type(self).__name__}: total_steps is {total_steps} and warmup_steps {warmup_steps}; expected "
                "0 <= warmup_steps < total_steps"
            )
        self.total_steps, self.warmup_steps = total_steps, warmup_steps
        self.after_warmup = total_steps - warmup_steps
        super().__init__(plain(optimizer), last_epoch)

    def lr_at(self, step: int, base: float) -> float:
        """The rate of a step, counted from the end of the warm-up."""
        raise NotImplementedError

    def warm(self, step: int, base: float) -> float:
        """The rate of a step in the warm-up."""
        return base * (step + 1) / self.warmup_steps

    def get_lr(self) -> list[float]:
        """The rate of each group at this step."""
        step = self.last_epoch - self.warmup_steps
        return [self.lr_at(step, base) if step >= 0 else self.warm(self.last_epoch, base) for base in self.base_lrs]


class CosineAnnealingWarmupLR(FormulaLR):
    """eta_min + (base - eta_min) * (1 + cos(pi * step / steps)) / 2, after a warm-up."""

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def lr_at(self, step: int, base: float) -> float:
        """The cosine."""
        return _cosine(step / self.after_warmup, base, self.eta_min)


class FlatAnnealingWarmupLR(FormulaLR):
    """After a warm-up the base rate for the share pct_start of the steps; then half a cosine to eta_min."""

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= pct_start <= 1:
            raise ValueError(f"{type(self).__name__}: pct_start is {pct_start}; expected a share of the steps")
        self.eta_min = eta_min
        self.flat_steps = int((total_steps - warmup_steps) * pct_start)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def lr_at(self, step: int, base: float) -> float:
        """The base rate, then the cosine."""
        if step < self.flat_steps:
            return base
        return _cosine((step - self.flat_steps) / max(1, self.after_warmup - self.flat_steps), base, self.eta_min)


class LinearWarmupLR(FormulaLR):
    """base * (step + 1) / (warmup_steps + 1) in the warm-up, then linear to 0, where it stays after total_steps."""

    def __init__(self, optimizer: Any, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def warm(self, step: int, base: float) -> float:
        """The warm-up reaches the base rate one step later than that of the other schedules."""
        return base * (step + 1) / (self.warmup_steps + 1)

    def lr_at(self, step: int, base: float) -> float:
        """The share of steps that are left."""
        return base * max(0.0, 1 - step / self.after_warmup)


class MultiStepWarmupLR(FormulaLR):
    """The base rate times gamma for each milestone that is reached, after a warm-up. Milestones count all steps."""

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        if not milestones:
            raise ValueError(f"{type(self).__name__} needs milestones: the steps at which the rate falls")
        self.gamma = gamma
        self.milestones = sorted(milestone for milestone in milestones if milestone >= warmup_steps)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def lr_at(self, step: int, base: float) -> float:
        """A power of gamma."""
        return float(base * self.gamma ** bisect_right(self.milestones, step + self.warmup_steps))


class PolynomialWarmupLR(FormulaLR):
    """end_lr + (base - end_lr) * (share of steps that are left) ** power, after a warm-up."""

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        if end_lr < 0:
            raise ValueError(f"{type(self).__name__}: end_lr is {end_lr}; a learning rate is not negative")
        self.end_lr, self.power = end_lr, power
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def lr_at(self, step: int, base: float) -> float:
        """The power."""
        left = 1 - min(step, self.after_warmup) / self.after_warmup
        return float(self.end_lr + (base - self.end_lr) * left**self.power)


class _NoWarmup:
    """The schedule beside it, without the argument warmup_steps."""

    def __init__(self, optimizer: Any, total_steps: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, total_steps, 0, *args, **kwargs)  # type: ignore[call-arg]


class CosineAnnealingLR(_NoWarmup, CosineAnnealingWarmupLR):
    """Half a cosine to eta_min: (optimizer, total_steps, eta_min=0)."""


class FlatAnnealingLR(_NoWarmup, FlatAnnealingWarmupLR):
    """The base rate for a share of the steps, then half a cosine to 0: (optimizer, total_steps, pct_start=0.72)."""


class MultiStepLR(_NoWarmup, MultiStepWarmupLR):
    """A factor at each milestone: (optimizer, total_steps, milestones, gamma=0.1)."""


class PolynomialLR(_NoWarmup, PolynomialWarmupLR):
    """A power of the share of steps that are left: (optimizer, total_steps, end_lr=0.0001, power=1.0)."""


class _Torch:
    """The scheduler of torch beside it, with an argument total_steps that it does not need."""

    def __init__(self, optimizer: Any, total_steps: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(plain(optimizer), *args, **kwargs)  # type: ignore[call-arg]


class LambdaLR(_Torch, lr_scheduler.LambdaLR):
    """(optimizer, total_steps, lr_lambda)."""


class MultiplicativeLR(_Torch, lr_scheduler.MultiplicativeLR):
    """(optimizer, total_steps, lr_lambda)."""


class StepLR(_Torch, lr_scheduler.StepLR):
    """(optimizer, total_steps, step_size=1, gamma=0.1)."""

    def __init__(self, optimizer: Any, total_steps: int, step_size: int = 1, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, total_steps, step_size, *args, **kwargs)


class ExponentialLR(_Torch, lr_scheduler.ExponentialLR):
    """(optimizer, total_steps, gamma=1.0)."""

    def __init__(self, optimizer: Any, total_steps: int, gamma: float = 1.0, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, total_steps, gamma, *args, **kwargs)


class OneCycleLR(lr_scheduler.OneCycleLR):
    """torch's one-cycle schedule, with the groups' own rates as its largest. Options and defaults are torch's."""

    def __init__(self, optimizer: Any, total_steps: int, pct_start: float = 0.3, **options: Any) -> None:
        largest = [group["lr"] for group in plain(optimizer).param_groups]
        super().__init__(plain(optimizer), largest, total_steps=total_steps, pct_start=pct_start, **options)


def plain(optimizer: Any) -> Any:
    """The torch optimizer in what `boost` returned."""
    return optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer


def _cosine(share: float, base: float, end: float) -> float:
    return end + (base - end) * (1 + math.cos(math.pi * share)) / 2

"""Learning rate schedules with a warm-up, each a formula of the step and the group's base rate. Names are ColossalAI's.

Step t is the number of calls of `step()` so far. The rate of step 0 is set when the schedule is created. The optimizer
may be a torch optimizer, or an optimizer that `boost` returned.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch.optim import lr_scheduler

from core.interface import OptimizerWrapper


def plain(optimizer: Any) -> Any:
    """Return the torch optimizer inside an optimizer that `boost` returned.

    Args:
        optimizer: A boosted optimizer, or a torch optimizer, which is returned unchanged.
    """
    return optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer


class FormulaLR(lr_scheduler.LRScheduler):
    """Base class of schedules that follow `formula` after a linear warm-up from base / warmup_steps.

    Args:
        optimizer: A torch optimizer, or a boosted one.
        total_steps: Number of steps of training.
        warmup_steps: Number of steps of the warm-up.
        last_epoch: As in torch's schedulers.
        **o: Options of the formula.

    Raises:
        ValueError: If an option is out of its range.
    """

    late = 0  # steps between the end of the warm-up and the base rate

    def __init__(self, optimizer: Any, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1, **o: Any) -> None:
        self.options, self.total_steps, self.warmup_steps = o, total_steps, warmup_steps
        self.after_warmup = total_steps - warmup_steps
        for wrong, what in (
            (not 0 <= warmup_steps < total_steps, f"warmup_steps is {warmup_steps}, total_steps {total_steps}; it is"
             " at least 0 and less than total_steps"),
            (not 0 <= o.get("pct_start", 0) <= 1, f"pct_start is {o.get('pct_start')}; it is a share of the steps"),
            (o.get("end_lr", 0) < 0, f"end_lr is {o.get('end_lr')}; a learning rate is not negative"),
            (not o.get("milestones", True), "give milestones: the steps at which the rate falls"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(f"{type(self).__name__}: {what}")
        super().__init__(plain(optimizer), last_epoch)

    def formula(self, step: int, base: float) -> float:
        """Return the rate of a step.

        Args:
            step: Steps since the end of the warm-up.
            base: The group's base rate.
        """
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Return the rate of each group at this step."""
        step, warm = self.last_epoch - self.warmup_steps, (self.last_epoch + 1) / (self.warmup_steps + self.late or 1)
        return [float(self.formula(step, base)) if step >= 0 else base * warm for base in self.base_lrs]


def _cosine(self: FormulaLR, step: int, base: float) -> float:
    flat, end = int(self.after_warmup * self.options.get("pct_start", 0.0)), self.options.get("eta_min", 0.0)
    share = (step - flat) / max(1, self.after_warmup - flat)
    return base if step < flat else float(end + (base - end) * (1 + math.cos(math.pi * share)) / 2)


def _linear(self: FormulaLR, step: int, base: float) -> float:
    return base * max(0.0, 1 - step / self.after_warmup)


def _multistep(self: FormulaLR, step: int, base: float) -> Any:
    reached = sorted(milestone for milestone in self.options["milestones"] if milestone >= self.warmup_steps)
    return base * self.options["gamma"] ** bisect_right(reached, step + self.warmup_steps)


def _polynomial(self: FormulaLR, step: int, base: float) -> Any:
    left, end = 1 - min(step, self.after_warmup) / self.after_warmup, self.options["end_lr"]
    return end + (base - end) * left ** self.options["power"]


class CosineAnnealingWarmupLR(FormulaLR):
    """Half a cosine from the base rate to eta_min, after a linear warm-up.

    Args:
        optimizer: A torch optimizer, or a boosted one.
        total_steps: Number of steps of training.
        warmup_steps: Number of steps of the warm-up.
        eta_min: Learning rate at total_steps.
        last_epoch: As in torch's schedulers.
    """

    formula = _cosine

    def __init__(
        self, optimizer: Any, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch, eta_min=eta_min)


class FlatAnnealingWarmupLR(FormulaLR):
    """Base rate for a fraction of the steps after the warm-up, then half a cosine to eta_min.

    Args:
        optimizer: A torch optimizer, or a boosted one.
        total_steps: Number of steps of training.
        warmup_steps: Number of steps of the warm-up.
        pct_start: Fraction of the steps after the warm-up with the base rate; in [0, 1].
        eta_min: Learning rate at total_steps.
        last_epoch: As in torch's schedulers.
    """

    formula = _cosine

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch, pct_start=pct_start, eta_min=eta_min)


class LinearWarmupLR(FormulaLR):
    """Linear decay to 0 at total_steps, then 0. The base rate is reached one step after the warm-up.

    Args:
        optimizer: A torch optimizer, or a boosted one.
        total_steps: Number of steps of training.
        warmup_steps: Number of steps of the warm-up.
        last_epoch: As in torch's schedulers.
    """

    formula, late = _linear, 1

    def __init__(self, optimizer: Any, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)


class MultiStepWarmupLR(FormulaLR):
    """Base rate, multiplied by gamma at each milestone, after a linear warm-up.

    Args:
        optimizer: A torch optimizer, or a boosted one.
        total_steps: Number of steps of training.
        warmup_steps: Number of steps of the warm-up.
        milestones: Steps at which the rate falls, counted from the first step of the warm-up.
        gamma: Factor of each fall.
        last_epoch: As in torch's schedulers.
    """

    formula = _multistep

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch, milestones=milestones, gamma=gamma)


class PolynomialWarmupLR(FormulaLR):
    """Polynomial decay: end_lr + (base - end_lr) * (fraction of remaining steps) ** power.

    Args:
        optimizer: A torch optimizer, or a boosted one.
        total_steps: Number of steps of training.
        warmup_steps: Number of steps of the warm-up.
        end_lr: Learning rate from total_steps on; not negative.
        power: Exponent of the decay.
        last_epoch: As in torch's schedulers.
    """

    formula = _polynomial

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch, end_lr=end_lr, power=power)

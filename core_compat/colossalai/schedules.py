"""LR schedules with ColossalAI's names, each a formula of the step and the group's base rate, or a class of torch.

An unknown keyword of a schedule raises TypeError; ColossalAI ignores it. The optimizer may be a torch optimizer, or an
optimizer that ``boost`` returned.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

from torch.optim import lr_scheduler

from core.interface import OptimizerWrapper
from core_compat.arguments import arguments


class _Formula(lr_scheduler.LRScheduler):
    """Base class of schedules that follow ``formula`` after a linear warm-up from base / warmup_steps.

    ``o`` has the options of the formula. Raises ValueError if one is out of its range.
    """

    late = 0  # steps between the end of the warm-up and the base rate

    def __init__(self, optimizer: Any, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1, **o: Any) -> None:
        self.options, self.warmup_steps, self.after_warmup = o, warmup_steps, total_steps - warmup_steps
        for is_invalid, what in (
            (not 0 <= warmup_steps < total_steps, f"warmup_steps is {warmup_steps}, total_steps {total_steps}; it is"
             " at least 0 and less than total_steps"),
            (not 0 <= o.get("pct_start", 0) <= 1, f"pct_start is {o.get('pct_start')}; it is a share of the steps"),
            (o.get("end_lr", 0) < 0, f"end_lr is {o.get('end_lr')}; a learning rate is not negative"),
            (not o.get("milestones", True), "give milestones: the steps at which the rate falls"),
        ):  # fmt: skip
            if is_invalid:
                raise ValueError(f"{type(self).__name__}: {what}")
        super().__init__(optimizer, last_epoch)

    def formula(self, step: int, base: float) -> float:
        """Return the rate for a number of steps since the end of the warm-up, from the group's base rate."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Return the rate of each group at this step, the number of calls of ``step()`` so far."""
        step, warm = self.last_epoch - self.warmup_steps, (self.last_epoch + 1) / (self.warmup_steps + self.late or 1)
        return [float(self.formula(step, base)) if step >= 0 else base * warm for base in self.base_lrs]


class _Cosine(_Formula):
    """Base rate for the fraction pct_start of the steps after the warm-up, then half a cosine to eta_min."""

    def formula(self, step: int, base: float) -> float:
        flat, end = int(self.after_warmup * self.options.get("pct_start", 0.0)), self.options.get("eta_min", 0.0)
        share = (step - flat) / max(1, self.after_warmup - flat)
        return base if step < flat else float(end + (base - end) * (1 + math.cos(math.pi * share)) / 2)


class _Linear(_Formula):
    """Linear decay to 0 at total_steps, then 0. The base rate is reached one step after the warm-up."""

    late = 1

    def formula(self, step: int, base: float) -> float:
        return base * max(0.0, 1 - step / self.after_warmup)


class _MultiStep(_Formula):
    """Base rate, multiplied by gamma at each milestone; milestones count from the first step of the warm-up."""

    def formula(self, step: int, base: float) -> float:
        reached = sorted(milestone for milestone in self.options["milestones"] if milestone >= self.warmup_steps)
        return float(base * self.options["gamma"] ** bisect_right(reached, step + self.warmup_steps))


class _Polynomial(_Formula):
    """Polynomial decay: end_lr + (base - end_lr) * (fraction of remaining steps) ** power."""

    def formula(self, step: int, base: float) -> float:
        left, end = 1 - min(step, self.after_warmup) / self.after_warmup, self.options["end_lr"]
        return float(end + (base - end) * left ** self.options["power"])


def _plain(optimizer: Any) -> Any:
    return optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer


def _face(name: str, kind: Any, row: str) -> Any:
    """Create a schedule class with the arguments of a row after ``optimizer``."""

    def build(self: Any, optimizer: Any, **options: Any) -> None:
        kind.__init__(self, _plain(optimizer), **options)

    taken = arguments(f"self optimizer {row} last_epoch=-1")(build)
    return type(name, (kind,), {"__init__": taken, "__doc__": kind.__doc__, "__module__": __name__})


_WARM = "total_steps warmup_steps=0"
CosineAnnealingLR = _face("CosineAnnealingLR", _Cosine, "total_steps eta_min=0")
CosineAnnealingWarmupLR = _face("CosineAnnealingWarmupLR", _Cosine, f"{_WARM} eta_min=0.0")
FlatAnnealingLR = _face("FlatAnnealingLR", _Cosine, "total_steps pct_start=0.72")
FlatAnnealingWarmupLR = _face("FlatAnnealingWarmupLR", _Cosine, f"{_WARM} pct_start=0.72 eta_min=0.0")
LinearWarmupLR = _face("LinearWarmupLR", _Linear, _WARM)
MultiStepLR = _face("MultiStepLR", _MultiStep, "total_steps milestones=None gamma=0.1")
MultiStepWarmupLR = _face("MultiStepWarmupLR", _MultiStep, f"{_WARM} milestones=None gamma=0.1")
PolynomialLR = _face("PolynomialLR", _Polynomial, "total_steps end_lr=0.0001 power=1.0")
PolynomialWarmupLR = _face("PolynomialWarmupLR", _Polynomial, f"{_WARM} end_lr=0.0001 power=1.0")
# torch's schedules do not need total_steps.
LambdaLR = _face("LambdaLR", lr_scheduler.LambdaLR, "-total_steps lr_lambda=None")
MultiplicativeLR = _face("MultiplicativeLR", lr_scheduler.MultiplicativeLR, "-total_steps lr_lambda=None")
StepLR = _face("StepLR", lr_scheduler.StepLR, "-total_steps step_size=1 gamma=0.1")
ExponentialLR = _face("ExponentialLR", lr_scheduler.ExponentialLR, "-total_steps gamma=1.0")


class OneCycleLR(lr_scheduler.OneCycleLR):
    """torch's one-cycle schedule with the groups' LRs as maximum. Options and defaults are torch's."""

    def __init__(self, optimizer: Any, total_steps: int, pct_start: float = 0.3, **options: Any) -> None:
        largest = [group["lr"] for group in _plain(optimizer).param_groups]
        super().__init__(_plain(optimizer), largest, total_steps=total_steps, pct_start=pct_start, **options)

"""Learning rate schedules by ColossalAI's names. Most are a formula of the step and the group's own rate.

Step t is the number of calls of `step()` so far; the rate of step 0 is set when the schedule is made. An optimizer
that `boost` returned may be given as well as the torch optimizer in it. A keyword that a schedule does not have is a
TypeError; ColossalAI drops it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

from torch.optim import lr_scheduler

from core.compat.arguments import arguments
from core.interface import OptimizerWrapper


def plain(optimizer: Any) -> Any:
    """The torch optimizer in what `boost` returned."""
    return optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer


class FormulaLR(lr_scheduler.LRScheduler):
    """A schedule whose `formula` follows a linear warm-up from base / warmup_steps. ValueError for a bad option."""

    late = 0  # how many steps later than the last one of the warm-up the base rate is reached

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
        """The rate of a step, counted from the end of the warm-up."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """The rate of each group at this step."""
        step, warm = self.last_epoch - self.warmup_steps, (self.last_epoch + 1) / (self.warmup_steps + self.late or 1)
        return [float(self.formula(step, base)) if step >= 0 else base * warm for base in self.base_lrs]


def _cosine(self: FormulaLR, step: int, base: float) -> float:
    """Flat for the share pct_start of the steps, then half a cosine from the base rate to eta_min."""
    flat, end = int(self.after_warmup * self.options.get("pct_start", 0.0)), self.options.get("eta_min", 0.0)
    share = (step - flat) / max(1, self.after_warmup - flat)
    return base if step < flat else float(end + (base - end) * (1 + math.cos(math.pi * share)) / 2)


def _linear(self: FormulaLR, step: int, base: float) -> float:
    """Linear to 0 at total_steps, where it stays; the warm-up reaches the base rate one step later."""
    return base * max(0.0, 1 - step / self.after_warmup)


def _multistep(self: FormulaLR, step: int, base: float) -> Any:
    """The base rate times gamma for each milestone that is reached. Milestones count all steps."""
    reached = sorted(milestone for milestone in self.options["milestones"] if milestone >= self.warmup_steps)
    return base * self.options["gamma"] ** bisect_right(reached, step + self.warmup_steps)


def _polynomial(self: FormulaLR, step: int, base: float) -> Any:
    """end_lr + (base - end_lr) * (share of steps that are left) ** power."""
    left, end = 1 - min(step, self.after_warmup) / self.after_warmup, self.options["end_lr"]
    return end + (base - end) * left ** self.options["power"]


def _schedule(name: str, row: str, formula: Any, late: int = 0) -> Any:
    """A schedule of a formula, with the arguments of a row behind (optimizer, total_steps)."""
    taken = arguments(f"self optimizer total_steps {row} last_epoch=-1")(FormulaLR.__init__)
    space = {"__init__": taken, "formula": formula, "late": late, "__doc__": formula.__doc__, "__module__": __name__}
    return type(name, (FormulaLR,), space)


CosineAnnealingLR = _schedule("CosineAnnealingLR", "eta_min=0", _cosine)
CosineAnnealingWarmupLR = _schedule("CosineAnnealingWarmupLR", "warmup_steps=0 eta_min=0.0", _cosine)
FlatAnnealingLR = _schedule("FlatAnnealingLR", "pct_start=0.72", _cosine)
FlatAnnealingWarmupLR = _schedule("FlatAnnealingWarmupLR", "warmup_steps=0 pct_start=0.72 eta_min=0", _cosine)
LinearWarmupLR = _schedule("LinearWarmupLR", "warmup_steps=0", _linear, late=1)
MultiStepLR = _schedule("MultiStepLR", "milestones=None gamma=0.1", _multistep)
MultiStepWarmupLR = _schedule("MultiStepWarmupLR", "warmup_steps=0 milestones=None gamma=0.1", _multistep)
PolynomialLR = _schedule("PolynomialLR", "end_lr=0.0001 power=1.0", _polynomial)
PolynomialWarmupLR = _schedule("PolynomialWarmupLR", "warmup_steps=0 end_lr=0.0001 power=1.0", _polynomial)


def _of_torch(kind: Any, row: str) -> Any:
    """torch's schedule, with an argument total_steps that it does not need."""

    def build(self: Any, optimizer: Any, **options: Any) -> None:
        kind.__init__(self, plain(optimizer), **options)

    taken = arguments(f"self optimizer -total_steps {row} last_epoch=-1")(build)
    return type(kind.__name__, (kind,), {"__init__": taken, "__doc__": kind.__doc__, "__module__": __name__})


LambdaLR = _of_torch(lr_scheduler.LambdaLR, "lr_lambda=None")
MultiplicativeLR = _of_torch(lr_scheduler.MultiplicativeLR, "lr_lambda=None")
StepLR = _of_torch(lr_scheduler.StepLR, "step_size=1 gamma=0.1")
ExponentialLR = _of_torch(lr_scheduler.ExponentialLR, "gamma=1.0")


class OneCycleLR(lr_scheduler.OneCycleLR):
    """torch's one-cycle schedule, with the groups' own rates as its largest. Options and defaults are torch's."""

    def __init__(self, optimizer: Any, total_steps: int, pct_start: float = 0.3, **options: Any) -> None:
        largest = [group["lr"] for group in plain(optimizer).param_groups]
        super().__init__(plain(optimizer), largest, total_steps=total_steps, pct_start=pct_start, **options)

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
    """A schedule with `lr_at(step, base)`, in which step 0 follows a linear warm-up from base / warmup_steps.

    Raises ValueError for an option outside its bounds.
    """

    late = 0  # how many steps later than the last one of the warm-up the base rate is reached

    def __init__(self, optimizer: Any, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1, **o: Any) -> None:
        kind = type(self).__name__
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(
                f"{kind}: total_steps is {total_steps} and warmup_steps {warmup_steps}; expected 0 <= warmup_steps < "
                "total_steps"
            )
        if not 0 <= o.get("pct_start", 0) <= 1:
            raise ValueError(f"{kind}: pct_start is {o['pct_start']}; expected a share of the steps")
        if o.get("end_lr", 0) < 0:
            raise ValueError(f"{kind}: end_lr is {o['end_lr']}; a learning rate is not negative")
        if "milestones" in o and not o["milestones"]:
            raise ValueError(f"{kind} needs milestones: the steps at which the rate falls")
        self.options, self.total_steps, self.warmup_steps = o, total_steps, warmup_steps
        self.after_warmup = total_steps - warmup_steps
        super().__init__(plain(optimizer), last_epoch)

    def lr_at(self, step: int, base: float) -> float:
        """The rate of a step, counted from the end of the warm-up."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """The rate of each group at this step."""
        step, warm = self.last_epoch - self.warmup_steps, (self.last_epoch + 1) / (self.warmup_steps + self.late or 1)
        return [self.lr_at(step, base) if step >= 0 else base * warm for base in self.base_lrs]

    def cosine(self, share: float, base: float) -> float:
        """Half a cosine, from the base rate to eta_min."""
        end = self.options.get("eta_min", 0.0)
        return float(end + (base - end) * (1 + math.cos(math.pi * share)) / 2)


class CosineAnnealingWarmupLR(FormulaLR):
    """eta_min + (base - eta_min) * (1 + cos(pi * step / steps)) / 2, after a warm-up."""

    __init__ = arguments("self optimizer total_steps warmup_steps=0 eta_min=0.0 last_epoch=-1")(FormulaLR.__init__)

    def lr_at(self, step: int, base: float) -> float:
        """The cosine."""
        return self.cosine(step / self.after_warmup, base)


class FlatAnnealingWarmupLR(FormulaLR):
    """After a warm-up the base rate for the share pct_start of the steps; then half a cosine to eta_min."""

    __init__ = arguments("self optimizer total_steps warmup_steps=0 pct_start=0.72 eta_min=0 last_epoch=-1")(
        FormulaLR.__init__
    )

    def lr_at(self, step: int, base: float) -> float:
        """The base rate, then the cosine."""
        flat = int(self.after_warmup * self.options["pct_start"])
        return base if step < flat else self.cosine((step - flat) / max(1, self.after_warmup - flat), base)


class LinearWarmupLR(FormulaLR):
    """base * (step + 1) / (warmup_steps + 1) in the warm-up, then linear to 0, where it stays after total_steps."""

    late = 1
    __init__ = arguments("self optimizer total_steps warmup_steps=0 last_epoch=-1")(FormulaLR.__init__)

    def lr_at(self, step: int, base: float) -> float:
        """The share of steps that are left."""
        return base * max(0.0, 1 - step / self.after_warmup)


class MultiStepWarmupLR(FormulaLR):
    """The base rate times gamma for each milestone that is reached, after a warm-up. Milestones count all steps."""

    __init__ = arguments("self optimizer total_steps warmup_steps=0 milestones=None gamma=0.1 last_epoch=-1")(
        FormulaLR.__init__
    )

    def lr_at(self, step: int, base: float) -> float:
        """A power of gamma."""
        reached = sorted(milestone for milestone in self.options["milestones"] if milestone >= self.warmup_steps)
        return float(base * self.options["gamma"] ** bisect_right(reached, step + self.warmup_steps))


class PolynomialWarmupLR(FormulaLR):
    """end_lr + (base - end_lr) * (share of steps that are left) ** power, after a warm-up."""

    __init__ = arguments("self optimizer total_steps warmup_steps=0 end_lr=0.0001 power=1.0 last_epoch=-1")(
        FormulaLR.__init__
    )

    def lr_at(self, step: int, base: float) -> float:
        """The power."""
        left, end = 1 - min(step, self.after_warmup) / self.after_warmup, self.options["end_lr"]
        return float(end + (base - end) * left ** self.options["power"])


class CosineAnnealingLR(CosineAnnealingWarmupLR):
    """The cosine without a warm-up."""

    __init__ = arguments("self optimizer total_steps eta_min=0 last_epoch=-1")(FormulaLR.__init__)


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """The base rate for a share of the steps, then half a cosine to 0."""

    __init__ = arguments("self optimizer total_steps pct_start=0.72 last_epoch=-1")(FormulaLR.__init__)


class MultiStepLR(MultiStepWarmupLR):
    """A factor at each milestone."""

    __init__ = arguments("self optimizer total_steps milestones=None gamma=0.1 last_epoch=-1")(FormulaLR.__init__)


class PolynomialLR(PolynomialWarmupLR):
    """A power of the share of steps that are left."""

    __init__ = arguments("self optimizer total_steps end_lr=0.0001 power=1.0 last_epoch=-1")(FormulaLR.__init__)


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

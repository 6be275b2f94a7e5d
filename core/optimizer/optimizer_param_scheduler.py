"""OptimizerParamScheduler: learning rate and weight decay as functions of the number of samples seen.

The number of samples is the only state: each group's values are computed from it and the configuration. Loading a state
twice, or into groups that have an older run's rates, therefore changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from core.optimizer.optimizer_state import plain_numbers

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WD_INCR_STYLES = ("constant", "linear", "cosine")

# Remaining fraction of max_lr - min_lr after the fraction `r` in [0, 1] of a decay. Cosine: Loshchilov and Hutter, SGDR
# (arXiv:1608.03983), without restarts.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1.0),
}
# Decay of WSD after its plateau: MiniCPM (arXiv:2404.06395) introduced it with an exponential, Haegele et al.
# (arXiv:2405.18392) found 1 - sqrt best.
WSD_DECAYS: dict[str, Callable[[float], float]] = {
    **DECAYS,
    "exponential": lambda r: 2.0 * 0.5**r - 1.0,
    "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
}

SAVED = (
    *("max_lr", "min_lr", "init_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style"),
    *("wsd_decay_steps", "lr_wsd_decay_style", "start_wd", "end_wd", "wd_incr_steps", "wd_incr_style"),
)
GROUP_FIELDS = ("max_lr", "min_lr", "start_wd", "end_wd")  # a param group may override these


class HasParamGroups(Protocol):
    """Interface of an optimizer with param groups, such as torch's."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Param groups whose 'lr' and 'weight_decay' are set."""


@dataclass(eq=False, repr=False)
class OptimizerParamScheduler:
    """Sets 'lr' and 'weight_decay' of every param group from the number of samples seen, as Megatron's scheduler does.

        scheduler = OptimizerParamScheduler(
            optimizer, init_lr=0.0, max_lr=3e-4, min_lr=3e-5, lr_warmup_steps=1000,
            lr_decay_steps=100_000, lr_decay_style="cosine", start_wd=0.1, end_wd=0.1,
            wd_incr_steps=100_000, wd_incr_style="constant",
        )
        if optimizer.step()[0]:
            scheduler.step(increment=global_batch_size)

    Steps are counted in the unit of ``step``: samples, if ``step`` is called with the global batch size. A param
    group's own max_lr, min_lr, start_wd and end_wd override the scheduler's, and its lr_mult and wd_mult multiply the
    result. They are read when the scheduler is created.

    Args:
        optimizer: Optimizer whose param groups are set.
        init_lr: Learning rate at step 0.
        max_lr: Learning rate at the end of the warm-up.
        min_lr: Learning rate from ``lr_decay_steps`` on.
        lr_warmup_steps: Steps of the linear warm-up.
        lr_decay_steps: Step at which the decay ends.
        lr_decay_style: 'constant' (stays at max_lr), 'linear', 'cosine', 'inverse-square-root', or 'WSD' (stays at
            max_lr until ``wsd_decay_steps`` before the end, then decays in ``lr_wsd_decay_style``).
        start_wd: Weight decay at step 0.
        end_wd: Weight decay from ``wd_incr_steps`` on.
        wd_incr_steps: Steps from ``start_wd`` to ``end_wd``.
        wd_incr_style: 'constant', 'linear' or 'cosine'.
        use_checkpoint_opt_param_scheduler: Replace the configured numbers by those of a loaded state.
        override_opt_param_scheduler: Keep the configured numbers when a state is loaded. With neither option, the saved
            and the configured numbers must be equal.
        wsd_decay_steps: Steps of the final decay of 'WSD'.
        lr_wsd_decay_style: 'linear', 'cosine', 'exponential' or 'minus_sqrt', for 'WSD'.

    Raises:
        ValueError: If the numbers contradict each other.
    """

    SET_BY: ClassVar[Mapping[str, str]] = {}  # field -> the user's option for it
    SAVED_HOLD: ClassVar[str] = "use_checkpoint_opt_param_scheduler=True"  # the option, as error texts print it
    CONFIGURED_HOLD: ClassVar[str] = "override_opt_param_scheduler=True"

    optimizer: HasParamGroups
    init_lr: float
    max_lr: float
    min_lr: float
    lr_warmup_steps: int
    lr_decay_steps: int
    lr_decay_style: str
    start_wd: float
    end_wd: float
    wd_incr_steps: int
    wd_incr_style: str
    use_checkpoint_opt_param_scheduler: bool = True
    override_opt_param_scheduler: bool = False
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str | None = None

    def __post_init__(self) -> None:
        self.max_lr = float(self.max_lr)
        self.num_steps = 0
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ValueError(
                "use_checkpoint_opt_param_scheduler and override_opt_param_scheduler are both True; a loaded state's "
                "numbers either replace the configured ones or they do not"
            )
        # The groups as configured. A loaded optimizer writes an older run's numbers into its groups: not read again.
        self._own = [self._own_fields(group) for group in self.optimizer.param_groups]
        self._check({field: getattr(self, field) for field in SAVED})
        self.step(0)

    def _own_fields(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's own settings, without values equal to the scheduler's, so that those follow the
        scheduler.
        """
        if group.get("default_config") and group.get("max_lr", self.max_lr) != self.max_lr:
            raise ValueError(
                f"param group {group.get('name', '')!r} has the configured lr {group['max_lr']} and the scheduler's "
                f"max_lr is {self.max_lr}; give OptimizerConfig(lr=...) and the scheduler the same, and make the "
                "scheduler before a checkpoint is loaded into the optimizer"
            )
        own = {field: group[field] for field in GROUP_FIELDS if field in group and group[field] != getattr(self, field)}
        return own | {"lr_mult": group.get("lr_mult", 1.0), "wd_mult": group.get("wd_mult", 1.0)}

    def _check(self, numbers: Mapping[str, Any]) -> None:
        check_schedule(numbers)
        for index, own in enumerate(self._own):
            try:
                check_schedule({**numbers, **own})
            except ValueError as error:
                name = self.optimizer.param_groups[index].get("name", index)
                raise ValueError(f"param group {name!r}: {error}") from None

    # -- the functions ----------------------------------------------------------------------------------------------

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """Return a group's current learning rate without its lr_mult.

        ``param_group`` may override max_lr and min_lr.
        """
        max_lr = param_group.get("max_lr", self.max_lr)
        min_lr = param_group.get("min_lr", self.min_lr)
        seen, warmup, end = self.num_steps, self.lr_warmup_steps, self.lr_decay_steps
        if warmup > 0 and seen <= warmup:
            return float(self.init_lr + (max_lr - self.init_lr) * seen / warmup)
        if self.lr_decay_style == "constant":
            return float(max_lr)
        if seen > end:
            return float(min_lr)
        if self.lr_decay_style == "inverse-square-root":
            # Vaswani et al. (arXiv:1706.03762) eq. 3, scaled to pass through max_lr at the end of the warm-up.
            return float(max(min_lr, max_lr * math.sqrt(max(warmup, 1) / max(seen, 1))))
        if self.lr_decay_style == "WSD":
            assert self.wsd_decay_steps is not None and self.lr_wsd_decay_style is not None, "checked when it was set"
            begin = end - self.wsd_decay_steps
            rest = 1.0 if seen <= begin else WSD_DECAYS[self.lr_wsd_decay_style]((seen - begin) / self.wsd_decay_steps)
        else:
            rest = DECAYS[self.lr_decay_style]((seen - warmup) / (end - warmup))
        return float(min_lr + rest * (max_lr - min_lr))

    def get_wd(self, param_group: Mapping[str, Any] | None = None) -> float:
        """Return a group's current weight decay without its wd_mult.

        ``param_group`` may override start_wd and end_wd.
        """
        group = param_group or {}
        start, end = group.get("start_wd", self.start_wd), group.get("end_wd", self.end_wd)
        if self.wd_incr_style == "constant" or self.num_steps >= self.wd_incr_steps:
            return float(end)
        part = self.num_steps / self.wd_incr_steps
        rise = part if self.wd_incr_style == "linear" else 1.0 - DECAYS["cosine"](part)
        return float(start + rise * (end - start))

    def step(self, increment: int) -> None:
        """Advance the count and set every group's 'lr' and 'weight_decay', including empty groups.

        Args:
            increment (int): Number of samples since the last call.

        Raises:
            ValueError: If ``increment`` is negative, or a group was added after the scheduler was created.
        """
        if increment < 0:
            raise ValueError(f"step({increment}) would go back; load_state_dict sets an earlier count")
        self.num_steps += increment
        self._set_groups()

    def _set_groups(self) -> None:
        if len(self.optimizer.param_groups) != len(self._own):
            raise ValueError(
                f"the optimizer has {len(self.optimizer.param_groups)} param groups and had {len(self._own)} when the "
                "scheduler was made; make the scheduler after the last add_param_group"
            )
        for group, own in zip(self.optimizer.param_groups, self._own, strict=True):
            numbers = {"max_lr": self.max_lr, "min_lr": self.min_lr, **own}
            group.update(numbers)
            group["lr"] = self.get_lr(numbers) * own["lr_mult"]
            group["weight_decay"] = self.get_wd(numbers) * own["wd_mult"]

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples seen and every number of the schedule."""
        state: dict[str, Any] = plain_numbers({field: getattr(self, field) for field in ("num_steps", *SAVED)})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the sample count, and the schedule's numbers if configured so.

        The count is replaced, never added to. A state of Megatron's scheduler, which lacks the numbers of WSD and
        init_lr, loads too; the configured values are used for them.

        Args:
            state_dict (Mapping[str, Any]): The result of ``state_dict``, or the state of Megatron's scheduler.

        Raises:
            ValueError: If saved and configured numbers differ and neither use_checkpoint_opt_param_scheduler nor
                override_opt_param_scheduler is set, or if the count is missing. Nothing is changed in this case.
        """
        if "num_steps" not in state_dict:
            raise ValueError(f"the saved scheduler state has no 'num_steps'; it has {sorted(state_dict)}")
        configured = {field: getattr(self, field) for field in SAVED}
        saved = {field: state_dict[field] for field in SAVED if field in state_dict}
        different = [field for field in saved if saved[field] != configured[field]]
        if different and not (self.use_checkpoint_opt_param_scheduler or self.override_opt_param_scheduler):
            by_option: dict[str, list[str]] = {}
            for field in different:
                words = f"{field} (saved {saved[field]}, configured {configured[field]})"
                by_option.setdefault(self.SET_BY.get(field, ""), []).append(words)
            numbers = ", ".join(
                f"{option}, which sets {', '.join(words)}" if option else ", ".join(words)
                for option, words in by_option.items()
            )
            raise ValueError(
                f"the saved scheduler differs in {numbers}; set {self.SAVED_HOLD} to continue with the saved numbers, "
                f"or {self.CONFIGURED_HOLD} to continue with the configured ones"
            )
        if self.use_checkpoint_opt_param_scheduler:
            self._check({**configured, **saved})
            for field, value in saved.items():
                setattr(self, field, value)
        self.num_steps = int(state_dict["num_steps"])
        self._set_groups()


def check_schedule(numbers: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the fields, if the numbers of a schedule contradict each other."""
    max_lr, min_lr, init_lr = numbers["max_lr"], numbers["min_lr"], numbers["init_lr"]
    warmup, end, style = numbers["lr_warmup_steps"], numbers["lr_decay_steps"], numbers["lr_decay_style"]
    if not 0.0 <= min_lr <= max_lr:
        raise ValueError(f"min_lr {min_lr} and max_lr {max_lr}: expected 0 <= min_lr <= max_lr")
    if not 0.0 <= init_lr <= max_lr:
        raise ValueError(f"init_lr {init_lr} and max_lr {max_lr}: expected 0 <= init_lr <= max_lr")
    if style not in LR_DECAY_STYLES:
        raise ValueError(f"lr_decay_style {style!r} is not one of {', '.join(LR_DECAY_STYLES)}")
    if end <= 0:
        raise ValueError(f"lr_decay_steps is {end}; it must be above 0")
    if not 0 <= warmup <= end:
        raise ValueError(
            f"lr_warmup_steps is {warmup} and lr_decay_steps {end}; expected 0 <= lr_warmup_steps < lr_decay_steps"
        )
    if style == "WSD":
        plateau_end, wsd_style = numbers["wsd_decay_steps"], numbers["lr_wsd_decay_style"]
        if wsd_style not in WSD_DECAYS:
            raise ValueError(f"lr_wsd_decay_style {wsd_style!r} is not one of {', '.join(WSD_DECAYS)}")
        if plateau_end is None or not 0 < plateau_end <= end - warmup:
            raise ValueError(
                f"wsd_decay_steps is {plateau_end}; expected 1 to {end - warmup}, the steps between lr_warmup_steps "
                f"{warmup} and lr_decay_steps {end}"
            )
    start_wd, end_wd, wd_steps = numbers["start_wd"], numbers["end_wd"], numbers["wd_incr_steps"]
    if numbers["wd_incr_style"] not in WD_INCR_STYLES:
        raise ValueError(f"wd_incr_style {numbers['wd_incr_style']!r} is not one of {', '.join(WD_INCR_STYLES)}")
    if not 0.0 <= start_wd <= end_wd:
        raise ValueError(f"start_wd {start_wd} and end_wd {end_wd}: expected 0 <= start_wd <= end_wd")
    if numbers["wd_incr_style"] == "constant" and start_wd != end_wd:
        raise ValueError(f"wd_incr_style is 'constant' and start_wd {start_wd} is not end_wd {end_wd}")
    if wd_steps < 0:
        raise ValueError(f"wd_incr_steps is {wd_steps}; it must not be negative")


def get_canonical_lr_for_logging(param_groups: list[dict[str, Any]]) -> float | None:
    """Return the learning rate of the groups that follow the configured one, or ``None`` if no group does."""
    return next((group["lr"] for group in param_groups if group.get("default_config")), None)

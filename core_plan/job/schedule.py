"""The learning rate as a function of the samples seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from core.optimizer.optimizer_param_scheduler import HasParamGroups, OptimizerParamScheduler, check_schedule
from core_plan.job.config import RunConfig
from core_plan.job.errors import ConfigError


def schedule_numbers(config: RunConfig) -> dict[str, Any]:
    """Return the scheduler's arguments.

    The first step has lr / warmup_steps, step ``warmup_steps`` the full lr, and the last step min_lr. A run that ends
    within its warm-up never decays.

    Raises:
        ConfigError: If the schedule is impossible.
    """
    options, batch = config.optimizer, config.run.global_batch_size
    warmup = max(options.warmup_steps - 1, 0)  # steps done when the rate is highest
    last = max(config.run.steps - 1, warmup, 1)  # steps done when it is lowest
    numbers = {
        "init_lr": options.lr / max(options.warmup_steps, 1),
        "max_lr": options.lr,
        "min_lr": options.lr if options.decay == "constant" else options.min_lr,
        "lr_warmup_steps": warmup * batch,
        "lr_decay_steps": last * batch,
        "lr_decay_style": options.decay,
        "start_wd": options.weight_decay,
        "end_wd": options.weight_decay,
        "wd_incr_steps": last * batch,
        "wd_incr_style": "constant",
    }
    try:
        check_schedule({**numbers, "wsd_decay_steps": None, "lr_wsd_decay_style": None})
    except ValueError as error:
        raise ConfigError(
            f"--optimizer.lr {options.lr}, --optimizer.min-lr {options.min_lr} and --optimizer.warmup-steps: {error}"
        ) from error
    return numbers


class JobScheduler(OptimizerParamScheduler):
    """The scheduler of a job, whose user sets flags."""

    SAVED_HOLD = "--checkpoint.schedule saved"
    CONFIGURED_HOLD = "--checkpoint.schedule given"
    SET_BY: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("lr_decay_steps", "wd_incr_steps"), "--run.steps"),
        **dict.fromkeys(("lr_warmup_steps", "init_lr"), "--optimizer.warmup-steps"),
        **dict.fromkeys(("start_wd", "end_wd"), "--optimizer.weight-decay"),
        "max_lr": "--optimizer.lr",
        "min_lr": "--optimizer.min-lr",
        "lr_decay_style": "--optimizer.decay",
    }


def make_scheduler(config: RunConfig, optimizer: HasParamGroups) -> OptimizerParamScheduler:
    """The scheduler of a job; step it by the windows of each update."""
    which = config.checkpoint.schedule
    return JobScheduler(
        optimizer,
        **schedule_numbers(config),
        use_checkpoint_opt_param_scheduler=which == "saved",
        override_opt_param_scheduler=which == "given",
    )

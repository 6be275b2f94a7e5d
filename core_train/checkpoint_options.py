"""Checks of a job's checkpoint options, before any rank starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from core_plan.job.config import CheckpointOptions, RunConfig
from core_plan.job.config_file import to_json
from core_plan.job.errors import ConfigError

Config = TypeVar("Config", bound=RunConfig)
BEST = "best"  # the folder, among a run's checkpoints, of the one with the lowest validation loss

# Options of the model that change how it is computed, not what it is.
FREE_MODEL_OPTIONS = frozenset(
    (
        *("recompute_granularity", "gradient_accumulation_fusion", "dtype", "hidden_dropout", "attention_dropout"),
        *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
        *("moe_router_load_balancing_type", "moe_expert_capacity_factor"),
        *("logits_chunk", "recompute_modules", "recompute_num_layers"),
    )
)


def check_root(options: CheckpointOptions) -> None:
    """Raise ConfigError if a new run would save among another run's checkpoints, and delete them under ``keep``."""
    if options.dir is None or options.resume or options.step is not None or not options.dir.exists():
        return
    # Torch's checkpoints take a second to import; the process that starts ranks does without where it need not look.
    from core.checkpoint import CheckpointError, list_steps

    try:
        saved = list_steps(options.dir) or list_steps(options.dir / BEST)
    except CheckpointError as error:
        raise ConfigError(f"--checkpoint.dir {options.dir}: {error}") from error
    if saved:
        raise ConfigError(
            f"--checkpoint.dir {options.dir} holds checkpoints of another run (steps {saved[0]} to {saved[-1]}), and "
            "this run begins; add --checkpoint.resume to continue from them, or give another directory"
        )


def check_saved_model(config: RunConfig) -> None:
    """Raise ConfigError if a run would resume another model's checkpoint. Files are verified when they are loaded."""
    options = config.checkpoint
    if options.dir is None or not (options.resume or options.step is not None) or not options.dir.exists():
        return
    from core.checkpoint import CheckpointError
    from core.checkpoint.damage import Damage, open_manifest
    from core.checkpoint.root_directory import list_committed

    try:
        found = [each for each in list_committed(options.dir) if options.step in (None, each.step)]
        opened = open_manifest(found[-1].path) if found else None
    except CheckpointError as error:
        raise ConfigError(f"--checkpoint.dir {options.dir}: {error}") from error
    if opened is None or isinstance(opened, Damage):
        return
    saved = opened[1].meta.get("configuration")
    if isinstance(saved, Mapping):
        compare_configurations(saved, as_json(config))


def after_restart(config: Config) -> Config:
    """Configuration of a job that its launcher has started again: it resumes from its newest checkpoint.

    A job that is configured to begin from a certain step begins there again.
    """
    options = config.checkpoint
    if options.dir is None or options.step is not None:
        return config
    return replace(config, checkpoint=replace(options, resume=True))


def as_json(config: RunConfig) -> dict[str, Any]:
    """The configuration as JSON knows it."""
    values: dict[str, Any] = json.loads(to_json(config))
    return values


def compare_configurations(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe how a saved configuration differs from the current one. Raise ConfigError if the models differ.

    Options that only one side has are ignored: they came or went with a version.
    """
    differences = {
        f"{section}.{name}": (value, now[section][name])
        for section, options in saved.items()
        if isinstance(options, Mapping) and section in now
        for name, value in options.items()
        if name in now[section] and now[section][name] != value
    }
    for option, (before, after) in differences.items():
        section, _, name = option.partition(".")
        if section == "model" and name not in FREE_MODEL_OPTIONS:
            raise ConfigError(
                f"the checkpoint was saved with --{option.replace('_', '-')} {before}, and this run has {after}; "
                "resume with the same model, or begin another run in another --checkpoint.dir"
            )
    quiet = ("checkpoint.", "logging.")
    changed = [
        f"{name} {before} -> {after}" for name, (before, after) in differences.items() if not name.startswith(quiet)
    ]
    return [f"other options: {', '.join(changed)}"] if changed else []

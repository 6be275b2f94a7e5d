"""Checks of a job's checkpoint options, before any rank starts."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from core.training.config import CheckpointOptions, RunConfig
from core.training.errors import ConfigError

Config = TypeVar("Config", bound=RunConfig)
BEST = "best"  # the folder, among a run's checkpoints, of the one with the lowest validation loss


def check_root(options: CheckpointOptions) -> None:
    """ConfigError where a run that begins would save among another run's checkpoints, and delete them under `keep`."""
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


def after_restart(config: Config) -> Config:
    """Configuration of a job that its launcher has started again: it resumes from its newest checkpoint.

    A job that is configured to begin from a certain step begins there again.
    """
    options = config.checkpoint
    if options.dir is None or options.step is not None:
        return config
    return replace(config, checkpoint=replace(options, resume=True))

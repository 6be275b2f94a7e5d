"""The command: read the options, make every check of a start in this process, then start ranks and run the job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from core.extras import require_installed
from core.finetune.arguments import load_config, read_arguments
from core.finetune.config import TuneConfig
from core.finetune.model import check_sizes
from core.training.errors import ConfigError
from core.training.launch import Launch
from core.training.main import Command, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank, or start all of them; return the exit status."""
    return run_command(FINETUNE, argv)


def check_extras(config: TuneConfig, ranks_here: int) -> None:
    """Find out now if the packages are installed."""
    for package in ("transformers", "trl", "datasets", "accelerate", "peft"):
        require_installed(package, "fine-tuning", "trl")


def _check(config: TuneConfig, ranks: int) -> Any:
    """Make every check of a start, in the process that starts ranks. A launcher's ranks make them after their start."""
    if "RANK" in os.environ:
        return None
    from core.finetune.job import check

    return check(config, ranks)


def _run(config: TuneConfig, dp: int, launch: Launch) -> None:
    from core.finetune.job import run_tuning

    run_tuning(config, dp, launch)


def _dry_run(config: TuneConfig, ranks: int, ranks_here: int, device: str | None, says: bool, checked: Any) -> int:
    """Print the plan, and show which tokens are learned if the records were read."""
    if not says:
        return 0
    from core.finetune.planned import PlannedTuning
    from core.plan.dry_run import dry_run

    given = read_arguments(config, check_sizes(config, ranks))
    if checked is not None:
        print(f"the first record, learned in [[ ]]: {checked.sample()}")
    return dry_run(PlannedTuning(config, given), config.run, ranks, ranks_here, device, says=says)


def check_fit(config: TuneConfig, ranks: int, ranks_here: int) -> None:
    """Find out by the plan if the job cannot fit. A job that is far from it is not planned."""
    if not config.run.check_memory or config.options.task != "sft" or "RANK" in os.environ:
        return
    from core.finetune.planned import PlannedTuning, most_bytes
    from core.plan.dry_run import refuse_what_cannot_fit, this_machine

    job: Any = PlannedTuning(config, read_arguments(config, check_sizes(config, ranks)))
    here = this_machine(config.run, ranks_here)
    if most_bytes(job) > here.room(ranks_here):
        try:
            refuse_what_cannot_fit(job, config.run, ranks, ranks_here)
        except ConfigError as error:
            raise ConfigError(str(error).replace("--run.no-check-memory", "--check_memory false")) from None


FINETUNE: Command[TuneConfig, int] = Command(load_config, check_sizes, check_extras, _check, _run, _dry_run, check_fit)

"""The command of the main job: read and check the configuration, then start the ranks or run one of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from core.extras import MissingExtra, require_installed
from core.watch.interrupts import INTERRUPTED
from core_plan.job.config import DataOptions, JobConfig, RunConfig, RunOptions
from core_plan.job.config_file import load_config
from core_plan.job.errors import ConfigError
from core_plan.job.plan import JobPlan, plan_job
from core_plan.job.run_directory import check_writable
from core_plan.job.sizes import check_memory, most_bytes
from core_plan.machine.launch import Launch, find_launch, say_once
from core_plan.machine.memory import device_memory_bytes, host_memory_bytes
from core_plan.machine.own_ranks import STARTED_BY_US, become_rank, start_ranks
from core_plan.machine.threads import available_cores, intra_op_threads
from core_train.checkpoint_options import after_restart, check_root, check_saved_model
from core_train.output import outputs_that_may_go
from core_train.text import FILE_KINDS, open_dataset, open_text
from core_train.tokenizer import read_tokenizer
from core_train.tokens import check_windows, read_index
from core_train.trackers import check_tracker

Config = TypeVar("Config", bound=RunConfig)
Plan = TypeVar("Plan")
FAILURE = 1
USAGE_ERROR = 2
SOON_PLANNED = 256  # layers that are planned in seconds, with all changes that might help
DRY_RUN, DEVICE = "--dry-run", "--device"  # plan the job, and start nothing; for another device than this machine


@dataclass(frozen=True)
class Command(Generic[Config, Plan]):
    """A job as a command. All functions but ``run`` raise ConfigError or MissingExtra."""

    load: Callable[[list[str]], Config]  # parses arguments
    plan: Callable[[Config, int], Plan]  # returns the sizes on a number of ranks
    check: Callable[[Config, int], None]  # checks that this machine can run a number of ranks
    check_places: Callable[[Config, int], Any]  # checks that inputs exist and outputs can be written
    run: Callable[[Config, Plan, Launch], object]  # runs one rank
    # Prints the plan and returns the exit status. Arguments: ranks, ranks here, device or None for this machine, True
    # on the rank that prints, result of check_places or None.
    dry_run: Callable[[Config, int, int, str | None, bool, Any], int]
    check_fit: Callable[[Config, int, int], None]  # rejects a job that does not fit into memory


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank of the main job, or start all of them, and return the exit status."""
    return run_command(PRETRAIN, argv)


def run_command(command: Command[Any, Any], argv: Sequence[str] | None) -> int:
    """Run one rank of a job, or start all of them, and return the exit status.

    Under a launcher (torchrun, SLURM) this process is a rank. Otherwise it starts ``--run.ranks`` ranks on this
    machine.
    """
    with outputs_that_may_go():
        try:
            return _run(command, sys.argv[1:] if argv is None else list(argv))
        except KeyboardInterrupt:
            return INTERRUPTED


def _run(command: Command[Any, Any], arguments: list[str]) -> int:
    launch: Launch | None = None
    try:
        launch = find_launch(os.environ)
        dry, device, arguments = _take_dry_run(arguments)
        config = command.load(arguments)
        if launch is not None and launch.restarts > 0:
            config = after_restart(config)
        ranks_here = config.run.ranks if launch is None else launch.local_world_size
        ranks = config.run.ranks if launch is None else launch.world_size
        plan = command.plan(config, ranks)
        threads = intra_op_threads(
            os.environ,
            requested=config.run.threads_per_rank,
            cores=available_cores(),
            local_world_size=ranks_here,
        )
        checked = None
        if device is None:  # a plan for another device may be made on a machine that lacks the data
            checked = _check_start(command, config, ranks, ranks_here, is_planned=dry)
        if dry:
            return command.dry_run(config, ranks, ranks_here, device, launch is None or launch.rank == 0, checked)
    except (ConfigError, MissingExtra) as error:
        return _refuse(error, launch)
    if launch is None:
        return start_ranks(config.run.ranks)

    import torch

    from core.checkpoint import CheckpointError
    from core.watch.waiting import PeerLost
    from core_train.second_interrupt import EndAtSecondInterrupt

    become_rank(launch)
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # accelerate sets the number of cores, and warns, without it
    try:
        with EndAtSecondInterrupt(says=launch.rank == 0):
            command.run(config, plan, launch)
    except ConfigError as error:
        return _refuse(error, launch)
    except CheckpointError as error:  # a save failed; all ranks have the error
        _refuse(error, launch)
        return FAILURE
    except PeerLost as error:  # an error of other ranks: this rank's traceback adds nothing to the message
        print(f"error: {error}", file=sys.stderr)
        return FAILURE
    return 0


def _check_start(command: Command[Any, Any], config: Any, ranks: int, ranks_here: int, *, is_planned: bool) -> Any:
    """Make every check of a start, for a start and for a dry run, and return the result of ``check_places``.

    Places are not checked if only some of the job's ranks are here, because each rank would print the same error.
    """
    if is_planned:  # some packages start torch.distributed if they find these
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    command.check(config, ranks_here)
    if not is_planned and STARTED_BY_US not in os.environ:  # the starting process has checked
        command.check_fit(config, ranks, ranks_here)
    return command.check_places(config, ranks) if ranks == ranks_here else None


def _take_dry_run(arguments: Sequence[str]) -> tuple[bool, str | None, list[str]]:
    """Return True for a dry run, its device, and all other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(DRY_RUN, action="store_true")
    parser.add_argument(DEVICE)
    try:
        found, others = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if found.device is not None and not found.dry_run:
        raise ConfigError(
            f"{DEVICE} {found.device} is of a plan; add {DRY_RUN} to print one, or say --run.device for a run"
        )
    return found.dry_run, found.device, others


def _run_pretraining(config: JobConfig, plan: JobPlan, launch: Launch) -> object:
    from core_train.job import run_job

    return run_job(config, plan, launch)


def _dry_run_pretraining(
    config: JobConfig, ranks: int, ranks_here: int, device: str | None, says: bool, checked: None
) -> int:
    from core_plan.dry_run import dry_run

    return dry_run(config, config.run, ranks, ranks_here, device, says=says)


def check_fit(config: JobConfig, ranks: int, ranks_here: int) -> None:
    """Reject a job that cannot fit into memory, by its plan and by its sizes.

    The plan comes first, because it suggests changes that fit. It is skipped if the sizes are far too large or there
    are so many layers that planning takes long.
    """
    if not config.run.check_memory:
        return
    plan = plan_job(config, ranks)
    memory_bytes, sharing, _ = memory_here(config.run, ranks_here)
    in_flight = plan.num_microbatches if config.parallel.pp > 1 else 1
    if sharing * most_bytes(config, plan.micro_batch_size, in_flight) <= memory_bytes:
        return
    from core_plan.dry_run import refuse_what_cannot_fit

    if config.model.num_layers > SOON_PLANNED:
        check_room(config, ranks_here)
    refuse_what_cannot_fit(config, config.run, ranks, ranks_here)
    check_room(config, ranks_here)


def _check_pretraining(config: JobConfig, ranks_here: int) -> None:
    check_extras(config)
    if config.run.device == "cuda":
        import torch

        if torch.cuda.device_count() < ranks_here:
            raise ConfigError(
                f"--run.device cuda needs a GPU for each of the {ranks_here} ranks of this machine, which has "
                f"{torch.cuda.device_count()}; leave it out to run on the CPU"
            )


def check_room(config: JobConfig, ranks_here: int) -> None:
    """Reject a model whose parameters and gradients do not fit into this machine, or into its GPUs."""
    memory_bytes, sharing, name = memory_here(config.run, ranks_here)
    check_memory(config, sharing, memory_bytes, name)


def memory_here(options: RunOptions, ranks_here: int) -> tuple[int, int, str]:
    """Return the bytes of a memory that ranks of this machine use, how many ranks share it, and its name."""
    of_gpu = None if options.device == "cpu" else device_memory_bytes(ranks_here)
    return (host_memory_bytes(), ranks_here, "this machine") if of_gpu is None else (of_gpu, 1, "a GPU")


def check_extras(config: JobConfig) -> None:
    """Raise MissingExtra now, and not at the end of the run, if a requested package is not installed."""
    if config.logging.plots:
        require_installed("matplotlib", "drawing the plots (or give --logging.no-plots)")
    for name in config.logging.trackers:
        check_tracker(name)
    if config.data.dataset is not None:
        require_installed("datasets", f"--data.dataset {config.data.dataset}", "data")
    if config.data.tokenizer != "bytes":
        require_installed("tokenizers", f"--data.tokenizer {config.data.tokenizer}")


def check_places(config: JobConfig, ranks: int) -> None:
    """Check before ranks start that inputs exist and outputs can be written."""
    check_writable(config.run.directory, "--run.directory")
    check_writable(config.data.cache, "--data.cache")
    if config.checkpoint.dir is not None:
        check_writable(config.checkpoint.dir, "--checkpoint.dir")
    check_root(config.checkpoint)
    check_saved_model(config)
    if config.data.tokenizer not in ("bytes", "bpe"):
        try:
            read_tokenizer(Path(config.data.tokenizer))
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
    try:
        tokens = check_source(config.data)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if tokens is not None:
        check_windows(round(tokens * (1 - config.data.validation_fraction)), config.model.sequence_length)


def check_source(data: DataOptions) -> int | None:
    """Return the number of tokens, or None if it is known only after the text is tokenized.

    Raises:
        OSError, ValueError: If something is missing or cannot be read; the message names the option.
    """
    given = [name for name in ("text", "megatron", "dataset") if getattr(data, name)]
    if data.dataset in FILE_KINDS:
        if not data.text:
            raise ValueError(f"--data.dataset {data.dataset} reads files, and none are given; name them by --data.text")
        given.remove("text")
    if len(given) > 1:
        raise ValueError(f"--data.{given[0]} and --data.{given[1]} both set the training text; pass one of them")
    if data.dataset is None:
        defaults = DataOptions()
        for name in ("split", "column", "documents", "streaming"):
            if getattr(data, name) != getattr(defaults, name):
                raise ValueError(f"--data.{name} speaks of a data set, and none is given; add --data.dataset")
    if data.megatron is not None:
        if data.tokenizer == "bpe":
            raise ValueError(
                "--data.tokenizer bpe is trained on text, and --data.megatron gives tokens; leave it out, or give the "
                "tokenizer.json that has made them, to be kept with the model"
            )
        return read_index(data.megatron)[1]
    if data.dataset is not None:
        open_dataset(data)
        return None
    text = open_text(data.text)
    return sum(file.stat().st_size for file in text.files) if data.tokenizer == "bytes" else None


def _refuse(error: Exception, launch: Launch | None) -> int:
    """Print an error once; all ranks have the same error."""
    say_once(f"error: {error}", launch, os.environ)
    return USAGE_ERROR


PRETRAIN: Command[JobConfig, JobPlan] = Command(
    load_config, plan_job, _check_pretraining, check_places, _run_pretraining, _dry_run_pretraining, check_fit
)

"""The command: find out where this process stands, read what it is told, check it, run it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from core.interrupts import INTERRUPTED
from core.training.checkpoints import after_restart, check_root
from core.training.config import JobConfig
from core.training.config_file import load_config
from core.training.errors import ConfigError
from core.training.extras import MissingExtra, require_installed
from core.training.launch import Launch, find_launch
from core.training.memory import device_memory_bytes, host_memory_bytes
from core.training.output import outputs_that_may_go
from core.training.own_ranks import end_with_parent, start_ranks
from core.training.plan import plan_job
from core.training.run_directory import check_writable
from core.training.sizes import check_memory
from core.training.text import open_text
from core.training.threads import available_cores, intra_op_threads
from core.training.tokenizer import read_tokenizer

FAILURE = 1
USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank, or start all of them; the exit status.

    Under a launcher (torchrun, SLURM) this process is a rank. Started plainly it starts `--run.ranks` ranks on this
    machine and waits for them.
    """
    with outputs_that_may_go():
        try:
            return _main(sys.argv[1:] if argv is None else list(argv))
        except KeyboardInterrupt:
            return INTERRUPTED


def _main(arguments: list[str]) -> int:
    launch: Launch | None = None
    try:
        launch = find_launch(os.environ)
        config = load_config(arguments)
        if launch is not None and launch.restarts > 0:
            config = after_restart(config)
        plan = plan_job(config, config.run.ranks if launch is None else launch.world_size)
        check_extras(config)
        threads = intra_op_threads(
            os.environ,
            requested=config.run.threads_per_rank,
            cores=available_cores(),
            local_world_size=config.run.ranks if launch is None else launch.local_world_size,
        )
        check_room(config, config.run.ranks if launch is None else launch.local_world_size)
        if launch is None or launch.world_size == launch.local_world_size:  # all ranks would find the same
            check_places(config)
    except (ConfigError, MissingExtra) as error:
        return _refuse(error, launch)
    if launch is None:
        return start_ranks(config.run.ranks)

    import torch

    from core.checkpoint import CheckpointError
    from core.training.job import run_job
    from core.training.second_interrupt import EndAtSecondInterrupt

    end_with_parent(os.environ)
    os.environ.update(launch.environment())
    for name, value in launch.interfaces(sys.platform).items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(threads)
    try:
        with EndAtSecondInterrupt(says=launch.rank == 0):
            run_job(config, plan, launch)
    except ConfigError as error:
        return _refuse(error, launch)
    except CheckpointError as error:  # of a save; all ranks have it
        _refuse(error, launch)
        return FAILURE
    return 0


def check_room(config: JobConfig, ranks_here: int) -> None:
    """Find out before anything is allocated whether the model fits into this machine, or into its GPUs."""
    device_bytes = None if config.run.device == "cpu" else device_memory_bytes(ranks_here)
    if device_bytes is None:
        check_memory(config, ranks_here, host_memory_bytes())
    else:
        check_memory(config, 1, device_bytes, "a GPU")


def check_extras(config: JobConfig) -> None:
    """Find out now, not at the end of the run, whether what was asked for is installed."""
    if config.logging.plots:
        require_installed("matplotlib", "drawing the plots (or give --logging.no-plots)")
    if config.logging.tensorboard:
        require_installed("tensorboard", "--logging.tensorboard")
    if config.data.tokenizer != "bytes":
        require_installed("tokenizers", f"--data.tokenizer {config.data.tokenizer}")


def check_places(config: JobConfig) -> None:
    """Find out before ranks start whether what is to be read is there, and what is to be written is free."""
    check_writable(config.run.directory, "--run.directory")
    check_writable(config.data.cache, "--data.cache")
    if config.checkpoint.dir is not None:
        check_writable(config.checkpoint.dir, "--checkpoint.dir")
    check_root(config.checkpoint)
    if config.data.tokenizer not in ("bytes", "bpe"):
        try:
            read_tokenizer(Path(config.data.tokenizer))
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
    try:
        if config.data.text:  # the standard library is there
            open_text(config.data.text)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _refuse(error: Exception, launch: Launch | None) -> int:
    """Say once what is wrong; all ranks have found the same."""
    if launch is None or launch.rank == 0:
        print(f"error: {error}", file=sys.stderr)
    return USAGE_ERROR

"""`python -m core plan calibrate`: measure the current machine and write a device file for plans of runs on it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from core_plan.device import LONGEST_FILE, known_devices, read_device
from core_plan.job.errors import ConfigError
from core_plan.job.run_directory import check_writable
from core_plan.machine.launch import Launch, find_launch
from core_plan.machine.own_ranks import end_with_parent, start_ranks
from core_plan.machine.threads import available_cores

MOST_SECONDS = 600.0


def calibrate(arguments: Sequence[str]) -> int:
    """Measure on ranks started here, or on the ranks that a launcher has started, and return the exit status.

    Raises:
        ConfigError: On all ranks, if something cannot be measured or written.
    """
    options = _parser().parse_args(list(arguments))
    launch = find_launch(os.environ)
    ranks = _ranks_here(options.ranks) if launch is None else launch.world_size
    if launch is not None and launch.world_size != launch.local_world_size:
        raise ConfigError(
            f"{launch.world_size} ranks run on several machines, and calibrate measures one; start it on one of them, "
            "and write links.between into its file"
        )
    if ranks == 1 and options.links_from is None:
        raise ConfigError(
            "one rank has no links to measure; use --links-from to copy the links of a known device: "
            f"{', '.join(known_devices())}"
        )
    if not 0 < options.seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds {options.seconds:g} is not between 0 and {MOST_SECONDS:g}")
    if options.links_from is not None:
        read_device(options.links_from)
    if options.out.suffix != ".json":
        raise ConfigError(f"--out {options.out} does not end in .json, by which --device knows a file from a name")
    check_writable(options.out.parent, "--out")
    if launch is None:
        return start_ranks(ranks)
    _measure_rank(options, launch)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core plan calibrate",
        description="Measure this machine: products of matrices, memory, operators, the optimizer's update, and "
        "collectives of all its ranks. The file is one for --device.",
    )
    parser.add_argument("--out", type=Path, default=Path("this_machine.json"), help="the file that is written")
    parser.add_argument("--ranks", type=int, help="that work at once; as a rule one a GPU, or one a core")
    parser.add_argument("--seconds", type=float, default=60.0, help="that the measurements may take")
    parser.add_argument("--links-from", metavar="DEVICE", help="take the links of that device, and measure none")
    return parser


def _ranks_here(asked: int | None) -> int:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = gpus or 64 * available_cores()
    if asked is not None and not 1 <= asked <= most:
        raise ConfigError(f"--ranks {asked} is not between 1 and {most}, which this machine can take")
    return asked or gpus or max(2, available_cores())


def _measure_rank(options: argparse.Namespace, launch: Launch) -> None:
    import torch
    import torch.distributed as dist

    from core_plan.measure_device import measure

    end_with_parent(os.environ)
    os.environ.update(launch.environment())
    for name, value in launch.interfaces(sys.platform).items():
        os.environ.setdefault(name, value)
    on_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    if on_gpu:
        torch.cuda.set_device(launch.local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        links = None if options.links_from is None else read_device(options.links_from)
        table = measure(options.out.stem, options.seconds, links, command=_command(options))
        if launch.rank == 0:
            text = json.dumps(table, indent=2) + "\n"
            assert len(text) < LONGEST_FILE, "a device file is read up to a length"
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(text)
            place = shlex.quote(str(options.out))
            print(f"{table['about']}; written to {options.out}: python -m core plan --device {place} ...")
    finally:
        dist.destroy_process_group()


def _command(options: argparse.Namespace) -> str:
    links = [] if options.links_from is None else ["--links-from", str(options.links_from)]
    ranks = [] if options.ranks is None else ["--ranks", str(options.ranks)]
    command = ["python", "-m", "core", "plan", "calibrate", *ranks, "--seconds", f"{options.seconds:g}", *links]
    return shlex.join(command)

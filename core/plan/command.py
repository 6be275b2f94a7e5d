"""The command: read a model, a layout and a device; print the plan, or why it cannot be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from core.plan.changes import advice
from core.plan.device import known_devices, read_device
from core.plan.plan_run import plan_run
from core.training.config import AXIS_OPTIONS, JobConfig
from core.training.config_file import load_config
from core.training.errors import ConfigError
from core.training.extras import MissingExtra

DOES_NOT_FIT, USAGE_ERROR = 1, 2


def main(arguments: Sequence[str]) -> int:
    """Print a plan; 0 if the run fits, 1 if it does not, 2 with one line on standard error for what cannot be built."""
    try:
        return _plan(list(arguments))
    except (ConfigError, MissingExtra) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR


def _plan(arguments: list[str]) -> int:
    options, more = _parser().parse_known_args(arguments)
    config = job_config(options, more)
    plan = plan_run(config, options.ranks, read_device(options.device))
    print(plan.describe())
    if not plan.fits:
        print(advice(config, plan))
    return 0 if plan.fits else DOES_NOT_FIT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core.plan",
        description="Plan a run: memory of one rank of each kind, and the time of a step. Options of the main "
        "job (--model.num-layers 32, "
        "--ddp.bucket-size ...) may be added.",
    )
    parser.add_argument("--model", type=Path, action="append", default=[], help="a TOML file of the main job")
    parser.add_argument("--ranks", type=int, required=True, help="of the whole job")
    parser.add_argument("--device", default="h100", help=f"{', '.join(known_devices())}, or a .json file like theirs")
    parser.add_argument("--seq", type=int, help="tokens of a sequence")
    parser.add_argument("--global-batch", type=int, help="sequences of a step")
    parser.add_argument("--micro-batch", type=int, help="sequences of a forward")
    for axis in AXIS_OPTIONS:
        parser.add_argument(f"--{axis}", type=int, help=f"{axis} parallel size")
    return parser


def job_config(options: argparse.Namespace, more: Sequence[str]) -> JobConfig:
    """The main job's configuration that some options come to."""
    flags = [part for file in options.model for part in ("--config", str(file))]
    named = {
        "--model.sequence-length": options.seq,
        "--run.global-batch-size": options.global_batch,
        "--run.micro-batch-size": options.micro_batch,
        **{f"--parallel.{axis}": getattr(options, axis) for axis in AXIS_OPTIONS},
    }
    flags += [part for flag, value in named.items() if value is not None for part in (flag, str(value))]
    return load_config([*flags, *more])

"""Small programs of other libraries on the CPU, checked as by `python -m core verify`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist

from core.verify import GradientReport
from core.verify.asked import Asked
from core.verify.program import ProgramWatch


def last_report(program: Callable[[], None]) -> GradientReport:
    """Run a program, compare its gradients and weights, and return the last report. Collective over the world."""
    watch = ProgramWatch(Asked("a program", steps=2))
    with mock.patch.object(watch, "show", watch.reports.append), watch.active(), contextlib.suppress(SystemExit):
        program()
        watch.show_the_rest()
    return watch.reports[-1]


def launched(**more: str) -> Any:
    """Return a context with the environment variables of torchrun for the running ranks, and these."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return mock.patch.dict(os.environ, place | more)

"""The main job as a user starts it: a command, real signals, and what is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.unit_tests.core_train.training_reference import ROOT, TINY, text_flags_in

OWN = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--run.ranks", "2"]
LAUNCHERS = {
    "own": OWN,
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *OWN[1:2],
    ],
}
UNWANTED = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS"})


class MainJob:
    """A running command of 2 ranks with a checkpoint directory. A context manager: nothing of it is left."""

    def __init__(self, folder: Path, command: list[str], *flags: str, **options: Any) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        environment = {name: value for name, value in os.environ.items() if name not in UNWANTED}
        where = ["--run.directory", str(folder), "--checkpoint.dir", str(self.checkpoints), "--logging.no-plots"]
        data = text_flags_in(folder / "tokens")
        often = ["--run.steps", "100000", "--logging.print-every", "1", "--run.validation-windows", "4"]
        self.process = subprocess.Popen(
            [*command, *TINY, *data, *where, *often, *flags],
            env=environment,
            cwd=folder,
            text=True,
            preexec_fn=_hear_signals,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options,
        )
        self.lines: list[str] = []

    def read_until(self, start: str) -> str:
        """The first line from here that begins with `start`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(start):
                return line
        raise AssertionError(f"no line begins with {start!r}: {self.output}")

    def rest(self, limit_s: float = 60.0) -> int:
        """Wait for the end; the exit status."""
        output, _ = self.process.communicate(timeout=limit_s)
        self.lines.append(output or "")
        return self.process.returncode

    @property
    def output(self) -> str:
        """All that was read."""
        return "".join(self.lines)

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, in their order."""
        found = [child for child in psutil.Process(self.process.pid).children(recursive=True) if _rank_of(child)]
        return sorted(found, key=lambda child: int(_rank_of(child) or 0))

    def __enter__(self) -> MainJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def _hear_signals() -> None:
    """As in a terminal: what started the tests may ignore these (nohup, a job in the background)."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _rank_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("RANK")
    return None


def left(processes: list[psutil.Process], limit_s: float) -> Iterator[psutil.Process]:
    """Those that still run after at most `limit_s`."""
    until = time.monotonic() + limit_s
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    for process in processes:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            yield process

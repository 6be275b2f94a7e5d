"""Saves of two ranks that are killed on the way, many in a few seconds: each rank is a fork of one process with torch.

A fork costs milliseconds where a new interpreter with torch costs seconds. The process that forks has no threads, and
no group of its own. What the ranks leave on the disk is judged by the tests, from `Crash`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

WORLD = 2
LOST_A_PEER = 7  # exit status of a rank that noticed
LIMIT_S = 60.0


@dataclass(frozen=True)
class Crash:
    """One save of step 2 over a root that holds step 1, with keep_last=1, and how it is to end."""

    asynchronous: bool
    victim: int
    point: str | None = None
    after_s: float = 0.0  # where there is no point: a moment

    def __str__(self) -> str:
        where = self.point or f"{1000 * self.after_s:.0f} ms"
        return f"rank {self.victim} at '{where}'{', in a thread' if self.asynchronous else ''}"


@dataclass(frozen=True)
class Outcome:
    """What was found on the disk afterwards."""

    crash: Crash
    exits: list[int]  # by rank; negative: the signal
    found: int | None  # the step that find_intact gives
    newest: int | None  # the step after the next save
    left: list[str]  # hidden names in the root after the next save
    error: str = ""


def run_crashes(crashes: list[Crash], folder: str, send: Callable[[Outcome], None]) -> None:
    """Run each in a root of its own; to be called in a process that has nothing else to do."""
    from tests.unit_tests.checkpoint.checkpoint_saves import save_alone

    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    template = Path(folder) / "template"
    save_alone(template, 1, world=WORLD)
    for number, crash in enumerate(crashes):
        root = Path(folder) / f"case {number}"
        shutil.copytree(template, root)
        ranks = [_forked(crash, rank, root, Path(folder) / f"store-{number}") for rank in range(WORLD)]
        send(_judged(crash, root, [exit_of(rank) for rank in ranks]))
        shutil.rmtree(root)


def _judged(crash: Crash, root: Path, exits: list[int]) -> Outcome:
    from core.checkpoint.directory import check_directory, find_intact
    from core.checkpoint.root_directory import list_committed
    from tests.unit_tests.checkpoint.checkpoint_saves import assert_is_step, loaded, save_alone

    found = newest = None
    error = ""
    try:
        for committed in list_committed(root):
            damages = check_directory(committed.path)
            assert not damages, f"{committed.path.name} has a checkpoint's name and is half gone: {damages[0]}"
        directory = find_intact(root, strict=True)
        for rank in range(WORLD):
            assert_is_step(loaded(directory, rank), directory.step, rank)
        found = directory.step
        save_alone(root, 3, world=WORLD)
        directory = find_intact(root, strict=True)
        for rank in range(WORLD):
            assert_is_step(loaded(directory, rank), directory.step, rank)
        newest = directory.step
        assert (root / "latest").read_text() == f"{directory.path.name}\n"
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    left = sorted(path.name for path in root.iterdir() if path.name.startswith("."))
    return Outcome(crash, exits, found, newest, left, error)


def _forked(crash: Crash, rank: int, root: Path, store: Path) -> int:
    child = os.fork()
    if child:
        return child
    with contextlib.suppress(BaseException):
        signal.alarm(int(LIMIT_S))
        _save(crash, rank, root, store)
        os._exit(0)
    os._exit(LOST_A_PEER)


def _save(crash: Crash, rank: int, root: Path, store: Path) -> None:
    import torch.distributed as dist

    from core.checkpoint import pending_save, save_points, saver
    from tests.unit_tests.checkpoint.checkpoint_saves import save_step
    from tests.unit_tests.checkpoint.kill_points import kill_at

    saver.LOCK_LIMIT_S = 0.5
    pending_save.AFTER_THE_END_S = 0.5
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=LIMIT_S / 2)
    )
    with saver.CheckpointSaver(root, keep_last=1, file_bytes=1000, asynchronous=crash.asynchronous) as open_saver:
        if crash.point is not None:
            save_points.set_hook(kill_at(crash.point, crash.victim))
        elif rank == crash.victim:
            threading.Timer(crash.after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        save_step(open_saver, 2)
        open_saver.wait()
        if crash.point is None:
            time.sleep(1.0)  # the moment may come after everything


def exit_of(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def random_crashes(count: int, seed: int, longest_s: float = 0.15) -> list[Crash]:
    """Moments at random."""
    choose = random.Random(seed)
    return [
        Crash(choose.random() < 0.5, choose.randrange(WORLD), after_s=choose.random() * longest_s) for _ in range(count)
    ]


def process_main(crashes: list[Crash], folder: str, pipe: Any) -> None:
    """The body of the process that forks."""
    import torch

    torch.set_num_threads(1)
    run_crashes(crashes, folder, pipe.send)
    pipe.send(None)

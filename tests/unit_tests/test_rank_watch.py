"""RankWatch: every survivor names the rank that was lost, why, and where it waits itself."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from core import parallel_state, rank_watch
from core.verify import rank_pool
from core.verify.rank_pool import RankFailure, RankPool
from core.waiting import waiting

VICTIM, WORLD = 1, 3
LIMIT_S = {"kill": 2.0, "stop": 2.0, "exit": 4.0, "silent": 10.0}  # within which every survivor has named the rank
SLACK_S = 3.0  # for a busy machine
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


class Lines(logging.Handler):
    """What the watch has logged, with the time of each line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic(), record.getMessage()))


def wait_for(lines: list[tuple[float, str]], limit: float) -> None:
    while not lines and time.monotonic() < limit:
        time.sleep(0.05)


class Slow(nn.Module):
    def forward(self, heard: tuple[list[tuple[float, str]], float]) -> None:
        wait_for(*heard)


def fall(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        parallel_state.destroy_model_parallel()
        os._exit(0)


def lose_one(folder: Path, how: str, where: str) -> None:
    """Rank VICTIM falls; the others write what they heard and how long after it."""
    heard = Lines()
    logging.getLogger("core.rank_watch").addHandler(heard)
    if how == "silent":  # as if it were on another host, so that its process cannot be seen
        rank_watch._machine = lambda: f"host-{dist.get_rank()}"
    parallel_state.initialize_model_parallel(distributed_timeout_minutes=1)
    dist.barrier()
    begun = time.monotonic()
    rank = dist.get_rank()
    watch = parallel_state.get_rank_watch()
    assert watch is not None, "three ranks are watched"
    victim = watch.members[VICTIM].pid
    if rank == VICTIM:
        time.sleep(1.0)
        fall("stop" if how == "silent" else how)
    limit = begun + 1.0 + LIMIT_S[how] + SLACK_S
    if where == "forward":
        model = nn.Sequential(nn.Identity(), nn.Sequential(Slow()))
        model((heard.lines, limit))
    else:
        with waiting("the reduction of", [0, 1, 2], "bucket 7"):
            with contextlib.suppress(RuntimeError):  # gloo says that a connection was closed
                dist.barrier()
            wait_for(heard.lines, limit)
    (folder / f"{rank}.json").write_text(json.dumps([(when - begun - 1.0, line) for when, line in heard.lines]))
    if how in ("stop", "silent") and rank == 0:  # nobody else ends it
        while not (folder / "2.json").exists() and time.monotonic() < limit + SLACK_S:
            time.sleep(0.05)
        os.kill(victim, signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "where", "words"),
    [
        ("kill", "collective", "has ended"),
        ("kill", "forward", "has ended"),
        ("stop", "forward", "is stopped, by SIGSTOP or a debugger"),
        ("exit", "collective", "has ended without an error, and others wait for it"),
        ("silent", "forward", "is silent since"),
    ],
)
def test_every_survivor_names_the_lost_rank_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, where: str, words: str
) -> None:
    monkeypatch.setattr(rank_pool, "GRACE_S", 60.0)  # or the pool would end the survivors
    with RankPool(WORLD) as pool, pytest.raises(RankFailure):
        pool.run(lose_one, WORLD, (tmp_path, how, where), limit_s=1.0 + LIMIT_S[how] + 2 * SLACK_S)
    for rank in range(WORLD):
        if rank == VICTIM:
            continue
        (after, line), *_ = json.loads((tmp_path / f"{rank}.json").read_text())
        assert line.startswith(f"rank {rank}: rank {VICTIM} (process ") and words in line, line
        assert after < LIMIT_S[how] + SLACK_S, f"{line} after {after:.1f} s"
        if where == "forward":
            assert "This rank is in forward of Sequential.1.0, in wait_for (unit_tests/test_rank_watch.py:" in line
        else:
            assert line.endswith("This rank is waiting for the reduction of bucket 7, ranks 0, 1, 2")


def test_processes_of_another_host_of_the_same_name_are_not_looked_for_here() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here = rank_watch.this_member(0)
    twin = replace(here, rank=1, pid=2**30)
    assert rank_watch.RankWatch(store, [here, twin], 0).neighbours == [twin]
    elsewhere = replace(twin, machine=f"another {here.machine}")
    assert rank_watch.RankWatch(store, [here, elsewhere], 0).neighbours == []


def test_the_rank_that_failed_first_is_blamed_and_not_those_that_followed(tmp_path: Path) -> None:
    """Three processes without a launcher: rank 1 raises, rank 0 fails because of it, rank 2 sleeps."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = f"""
import sys, time, torch.distributed as dist
from core import parallel_state
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", {store.port}), rank=rank, world_size=3)
parallel_state.initialize_model_parallel()
dist.barrier()
pair = dist.new_group([0, 1])
time.sleep(1)
if rank == 1:
    raise ValueError("a bad batch")
if rank == 0:
    dist.barrier(pair)
time.sleep(4)
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", program, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert "rank 1 (process" in said[2] and "failed: ValueError: a bad batch" in said[2]
    assert "rank 2: rank 0" not in said[2]

"""RankWatch: every survivor names the rank that was lost, why, and where it waits itself."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.groups.local_store import local_store
from core.verify import rank_pool
from core.verify.rank_pool import RankFailure, RankPool
from core.watch import processes, rank_watch
from core.watch.flight_recorder import unfinished_collective
from core.watch.lost_rank import DEAD, LostRank
from core.watch.place import COLLECTIVES, _partners
from core.watch.prompt_store import PromptStore
from core.watch.stragglers import Stragglers
from core.watch.waiting import calling, waiting

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
    logging.getLogger("core.watch.rank_watch").addHandler(heard)
    if how == "silent":  # as if it were on another host, so that its process cannot be seen
        processes.machine_id = lambda: f"host-{dist.get_rank()}"
    parallel_state.initialize_model_parallel(distributed_timeout_minutes=1)
    dist.barrier()
    begun = time.monotonic()
    rank = dist.get_rank()
    watch = parallel_state.get_rank_watch()
    assert watch is not None, "three ranks are watched"
    while VICTIM not in watch.members:  # they are read as they come
        time.sleep(0.05)
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
    if how in ("stop", "silent") and rank == 0:  # no other ends it
        while not (folder / "2.json").exists() and time.monotonic() < limit + SLACK_S:
            time.sleep(0.05)
        os.kill(victim, signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "where", "words"),
    [
        ("kill", "collective", "has ended"),
        ("kill", "forward", "has ended"),
        ("stop", "forward", "is stopped, by SIGSTOP or a debugger"),
        (
            "exit",
            "collective",
            "has left without an error, and others wait for it: it ended, or called destroy_model_parallel",
        ),
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


def hold_one(folder: Path, how: str) -> None:
    """Rank VICTIM lives, and none of its threads runs for seconds; the others write what they heard."""
    heard = Lines()
    logging.getLogger("core.watch.rank_watch").addHandler(heard)
    rank_watch.SILENT_S = 2.0
    if how == "on another host":
        processes.machine_id = lambda: f"host-{dist.get_rank()}"
    parallel_state.initialize_model_parallel(distributed_timeout_minutes=1)
    dist.barrier()
    rank, watch = dist.get_rank(), parallel_state.get_rank_watch()
    assert watch is not None, "three ranks are watched"
    if rank == VICTIM:
        ctypes.PyDLL(None).sleep(5)  # as an import does that holds the interpreter
    else:
        wait_for(heard.lines, time.monotonic() + 2.0 + 2 * SLACK_S)
    lost = VICTIM in watch.lost
    with waiting("the reduction of", [0, 1, 2], "bucket 7"):
        dist.barrier()
    while VICTIM in watch.lost:
        time.sleep(0.05)
    (folder / f"{rank}.json").write_text(json.dumps([lost, [line for _, line in heard.lines]]))
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("how", ["here", "on another host"])
def test_a_rank_of_this_host_that_lives_is_busy_and_not_lost(tmp_path: Path, how: str) -> None:
    with RankPool(WORLD) as pool:
        pool.run(hold_one, WORLD, (tmp_path, how), limit_s=60.0)
    for rank in range(WORLD):
        if rank == VICTIM:
            continue
        lost, lines = json.loads((tmp_path / f"{rank}.json").read_text())
        assert lost is (how != "here")
        assert lines[0].startswith(f"rank {rank}: rank {VICTIM} (process ")
        if how == "here":
            assert "runs, and has not said where it is for" in lines[0] and "a long import" in lines[0]
            assert not any("lost" in line for line in lines)
            assert len([line for line in lines if f": rank {VICTIM} " in line]) == 1, lines
        else:
            assert "is silent since" in lines[0] and "lost, stopped or busy" in lines[0]
            assert any("is there again" in line for line in lines)


def test_processes_of_another_host_of_the_same_name_are_not_looked_for_here() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = rank_watch.RankWatch(store, here := processes.this_member(0), 2)
    twin = replace(here, rank=1, pid=2**30)
    watch.members[1] = twin
    assert watch._check_processes() == {1: ("dead", f"{twin} has ended")}
    watch.members[1] = replace(twin, machine=f"another {here.machine}")
    assert watch._check_processes() == {}


def test_of_two_dead_ranks_the_one_that_was_found_first_is_named_so() -> None:
    """Its output is the one to read: the other one followed."""
    watch = rank_watch.RankWatch(local_store(), processes.this_member(0), 3)
    for rank in (2, 1):
        watch.lost[rank] = LostRank(DEAD, f"rank {rank} has ended", 0.0)
    wait = waiting("the reduction of", [0, 1, 2], "bucket 7")
    with wait:
        pass
    wait.call = ""
    words, step = watch.account(wait)
    assert words == "; found first: rank 2 has ended; found later: rank 1 has ended"
    assert step.startswith("The output of rank 2 says why it ended")


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


# --- jobs of processes that no one looks after ------------------------------------------------------------------------


def run_plain(act: Callable[[int], object], folder: Path, world: int, port: int) -> list[int]:
    """Run `act(rank)` in `world` processes of multiprocessing; each one's exit status. What they log is in `folder`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "core.parallel_state", "core.checkpoint", "core.integrations"])
    job = [context.Process(target=in_a_process, args=(act, folder, rank, world, port)) for rank in range(world)]
    for process in job:
        process.start()
    for process in job:
        process.join(60)
        process.kill()
        process.join()
    return [process.exitcode for process in job]


def in_a_process(act: Callable[[int], object], folder: Path, rank: int, world: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # torch's flight recorder
    logging.basicConfig(filename=folder / f"{rank}.log", format="%(message)s")
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    holds_store = port < 0 and rank == 0
    store = dist.TCPStore("127.0.0.1", abs(port), is_master=holds_store, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    parallel_state.initialize_model_parallel()
    dist.barrier()
    act(rank)


def said_by(folder: Path, rank: int) -> list[str]:
    return (folder / f"{rank}.log").read_text().splitlines()


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def fail_and_follow(rank: int) -> None:
    """Rank 1 fails, rank 0 fails because of it, and rank 2 computes."""
    pair = dist.new_group([0, 1])
    if rank == 1:
        raise ValueError("a bad batch")
    if rank == 0:
        dist.barrier(pair)
    time.sleep(3)


def test_processes_of_multiprocessing_blame_the_first_too_and_the_follower_names_it(
    tmp_path: Path, store: dist.TCPStore
) -> None:
    assert run_plain(fail_and_follow, tmp_path, 3, store.port) == [1, 1, 0]
    for rank in (0, 2):
        (line,) = said_by(tmp_path, rank)
        assert f"rank {rank}: rank 1 (process " in line
        assert "failed: ValueError: a bad batch, last seen in fail_and_follow (unit_tests/test_rank_watch.py:" in line


def wait_in_vain(rank: int) -> None:
    rank_watch.END_AFTER_S = 1.0
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with waiting("an answer", [1]):
        time.sleep(30)


def test_a_wait_that_cannot_succeed_ends_with_its_process(tmp_path: Path, store: dist.TCPStore) -> None:
    begun = time.monotonic()
    assert run_plain(wait_in_vain, tmp_path, 2, store.port) == [1, -signal.SIGKILL]
    assert time.monotonic() - begun < 25
    named, ended = said_by(tmp_path, 0)
    assert "rank 1 (process " in named and "has ended" in named
    assert ended.startswith(
        "rank 0: it waits since a rank has ended, and this cannot succeed; it is ended too. This rank"
    )


def lose_the_store(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3)


def test_a_rank_that_holds_the_store_is_named_by_the_others_of_its_host(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert run_plain(lose_the_store, tmp_path, 3, -port) == [-signal.SIGKILL, 0, 0]
    killed = (tmp_path / "0.pid").read_text()
    for rank in (1, 2):
        assert any(f"rank {rank}: rank 0 (process {killed} on " in line for line in said_by(tmp_path, rank))


def hold_a_store(port: multiprocessing.queues.Queue[int]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(store.port)
    time.sleep(120)


def lose_the_network(rank: int) -> None:
    """The store falls silent, and then rank 1 ends."""
    folder = Path(logging.getLogger().handlers[0].baseFilename).parent
    if rank == 0:
        os.kill(int((folder / "store.pid").read_text()), signal.SIGSTOP)
    limit = time.monotonic() + 20
    while "does not answer" not in (folder / f"{rank}.log").read_text() and time.monotonic() < limit:
        time.sleep(0.1)
    if rank == 1:
        time.sleep(2.0)  # the others may say it a little later
        os.kill(os.getpid(), signal.SIGKILL)
    while "rank 1 (process" not in (folder / f"{rank}.log").read_text() and time.monotonic() < limit:
        time.sleep(0.1)


def state_of_thread(thread: Path) -> str:
    """One letter; T is stopped."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def test_a_store_whose_process_was_stopped_is_asked_again() -> None:
    context = multiprocessing.get_context("forkserver")
    port = context.Queue()
    holder = context.Process(target=hold_a_store, args=(port,))
    holder.start()
    try:
        store = dist.TCPStore("127.0.0.1", port.get(timeout=60), is_master=False)
        prompt = PromptStore(store, 0.3)
        assert prompt.add("members", 1) == 1 and not prompt.is_silent
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGSTOP)
        while any(state_of_thread(thread) != "T" for thread in Path(f"/proc/{holder.pid}/task").iterdir()):
            time.sleep(0.01)  # one of them may still answer
        for _ in range(2):  # the second call does not wait
            with pytest.raises(RuntimeError, match="no answer within 0 s"):
                prompt.add("members", 1)
            assert prompt.is_silent
        os.kill(holder.pid, signal.SIGCONT)
        limit = time.monotonic() + 20
        while prompt.is_silent and time.monotonic() < limit:
            time.sleep(0.01)
        assert prompt.add("members", 1) == 3  # the late call has counted, the refused one has not
    finally:
        holder.kill()
        holder.join()


def test_a_store_that_cannot_be_reached_is_reported_and_the_ranks_of_this_host_are_watched_on(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    port = context.Queue()
    holder = context.Process(target=hold_a_store, args=(port,))
    holder.start()
    try:
        (tmp_path / "store.pid").write_text(str(holder.pid))
        begun = time.monotonic()
        assert run_plain(lose_the_network, tmp_path, 3, port.get(timeout=60)) == [0, -signal.SIGKILL, 0]
        assert time.monotonic() - begun < 40
    finally:
        holder.kill()
        holder.join()
    killed = (tmp_path / "1.pid").read_text()
    for rank in (0, 2):
        lost, named = said_by(tmp_path, rank)
        assert f"rank {rank}: the job's store does not answer" in lost and "no answer within 6 s" in lost
        assert f"rank {rank}: rank 1 (process {killed} on " in named and "has ended" in named


def ask_where_the_other_is(rank: int) -> None:
    watch = parallel_state.get_rank_watch()
    assert watch is not None
    if rank == 1:
        time.sleep(rank_watch.STUCK_S + 3 * rank_watch.BEAT_S)
        beat = watch._beat_of(0)
        assert beat["ranks"] == [0, 1]
        logging.warning(beat["place"])
    dist.all_reduce(torch.ones(5, 3))
    until = time.monotonic() + 10.0  # gloo's thread writes down that it has ended after the caller has gone on
    while unfinished_collective() and time.monotonic() < until:
        time.sleep(0.01)
    assert unfinished_collective() == ""


def test_a_rank_that_is_stuck_names_the_collective_that_has_not_ended(tmp_path: Path, store: dist.TCPStore) -> None:
    assert run_plain(ask_where_the_other_is, tmp_path, 2, store.port) == [0, 0]
    (place,) = said_by(tmp_path, 1)
    where, _, unfinished = place.partition(" (not ended: ")
    assert "ask_where_the_other_is" in where
    assert re.fullmatch(r"all_reduce number \d+ of group default_pg \(\[\[5, 3\]\] \['Float'\]\)\)", unfinished), place


def stop_go_on_and_fall(rank: int) -> None:
    begun = time.monotonic()
    if rank == 0:
        pid = parallel_state.get_rank_watch().members[1].pid  # type: ignore[union-attr]
        for sign in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL):
            os.kill(pid, sign)
            time.sleep(1.5)
    while time.monotonic() - begun < 10 and rank == 1:
        time.sleep(0.1)


def test_a_rank_that_was_stopped_and_goes_on_is_no_longer_lost_and_named_again_when_it_falls(
    tmp_path: Path, store: dist.TCPStore
) -> None:
    assert run_plain(stop_go_on_and_fall, tmp_path, 2, store.port) == [0, -signal.SIGKILL]
    stopped, back, ended = said_by(tmp_path, 0)
    assert "is stopped, by SIGSTOP or a debugger" in stopped and "runs again" in back and "has ended" in ended


@pytest.mark.parametrize(
    ("call", "partners"),
    [("recv(tensor, src=2, group=None, tag=0)", (2,)), ("recv(tensor, src=None, group=None, tag=0)", ())],
)
def test_a_receive_waits_for_its_sender_alone(call: str, partners: tuple[int, ...]) -> None:
    """A rank that waits for a later stage, which computes, does not keep the others waiting in vain."""
    space: dict[str, Any] = {}
    exec(
        compile(
            f"import sys\ndef {call.replace('tensor', 'tensor=None')}: return sys._getframe()", COLLECTIVES[0], "exec"
        ),
        space,
    )
    assert _partners(space["recv"]()) == partners


# --- stragglers -------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_slow_in_each_of_its_last_steps_is_named_once_and_again_when_it_is_not() -> None:
    members = {rank: replace(processes.this_member(rank), stage=rank // 4) for rank in range(6)}
    watch = Stragglers()
    even = {rank: (0.09, 0.1) for rank in range(4)} | {rank: (0.9, 1.0) for rank in (4, 5)}  # stages differ
    assert watch.compare(even, members) == []
    assert watch.compare(even | {2: (0.1, 0.2)}, members) == [], "one of its steps was as fast"
    (line,) = watch.compare(even | {2: (0.16, 0.2), 3: None}, members)
    assert line.startswith(
        f"{members[2]} is slow: it works 0.2 s in a step, and the median of the ranks that do the same"
    )
    assert watch.slow == {2: 2.0}
    assert watch.compare(even | {2: (0.09, 0.2)}, members) == [], "still slow in most steps"
    assert watch.compare(even, members) == [f"{members[2]} is as fast as the others again"]
    assert watch.slow == {}


def work_and_wait(rank: int) -> None:
    """Steps of 120 ms, in which each rank but the last waits most of the time."""
    for step in range(1, 40):
        with calling("finalize_model_grads", step):
            own_s = 0.11 if rank == 2 else 0.005  # a sleep may last 30 ms longer on a busy machine
            time.sleep(own_s)
            with waiting("the others", [0, 1, 2]):
                time.sleep(0.12 - own_s)
    slow = parallel_state.get_rank_watch().stragglers.slow  # type: ignore[union-attr]
    logging.getLogger().error("slow: %s", list(slow))


def test_a_slow_rank_is_named_by_its_own_work_though_all_steps_take_equally_long(
    tmp_path: Path, store: dist.TCPStore
) -> None:
    assert run_plain(work_and_wait, tmp_path, 3, store.port) == [0, 0, 0]
    assert said_by(tmp_path, 1)[-1] == "slow: []", "only the lowest rank compares"
    named, slow = said_by(tmp_path, 0)[:2]
    assert named.startswith("rank 0: rank 2 (process ") and " is slow: it works 0." in named and slow == "slow: [2]"

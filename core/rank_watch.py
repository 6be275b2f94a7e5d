"""RankWatch: says within seconds which rank has ended or hangs, and where every rank waits.

A collective waits for all ranks, and a backend does not say for whom. So each process runs one thread beside the
training. Every BEAT_S it tells the job's store where the main thread is, looks at the processes of its own host, and
reads the beat of the next rank. The thread calls no collective and never touches a GPU.

- A process of this host that has ended, or that was stopped (SIGSTOP, a debugger), is seen in /proc.
- A rank whose beats stop for SILENT_S is silent: its host is lost, or the process is stopped there.
- What one rank has found it writes into the store. All ranks read it, and log it with the place where they wait.
- A rank that ends on purpose says so. One that ends because another rank was lost names that one, so the first
  rank that fell is blamed, and not those that followed.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from core import agree
from core.processes import ENDED, STOPPED, boot_id, state_of
from core.waiting import current_wait

BEAT_S = 0.5
SILENT_S = 6.0  # without a beat; a thread of Python may be kept from running for seconds by a long call
LONG_WAIT_S = 20.0  # in one place, before everybody's place is logged; doubled each time
STORE_LIMIT_S = 5.0  # for one answer of the store
EXPECTED_S = 1.5  # in one wait, before a rank that has left is missed
LEFT = -1  # the last beat of a rank that has ended by itself
PEERS_FAULT = re.compile("PeerLost|gloo|nccl|connection|timed out|timeout|broken pipe|did not come", re.IGNORECASE)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """One rank's process.

    machine: equal for ranks that see each other's processes. born: the start of the process, because process numbers
    are used again; "" where the system does not tell.
    """

    rank: int
    host: str
    machine: str
    pid: int
    born: str

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def this_member(rank: int) -> Member:
    """The process that calls it."""
    state = state_of(os.getpid())
    return Member(rank, socket.gethostname(), _machine(), os.getpid(), "" if state is None else state[1])


class RankWatch:
    """Watches the ranks of a job from `start` to `stop`.

    store: the job's; the watch opens a connection of its own. members: of all ranks, in rank order.
    """

    def __init__(self, store: dist.Store, members: list[Member], rank: int) -> None:
        self.store = store.clone()
        self.store.set_timeout(timedelta(seconds=STORE_LIMIT_S))
        self.members = members
        self.rank = rank
        self.neighbours = [m for m in members if m.machine == members[rank].machine and m.rank != rank and m.born]
        self.lost: dict[int, str] = {}  # rank -> what happened to it, in the order in which it was found
        self.left: set[int] = set()  # ranks that ended on purpose
        self.place = Place("", 0.0)
        self._beats: dict[int, tuple[int, float]] = {}  # rank -> its last beat, and when this rank saw it change
        self._beat = 0
        self._read = 0  # findings of the store that this rank has read
        self._next_report_s = LONG_WAIT_S
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="core-rank-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and tell the others that this rank leaves on purpose. May be called twice."""
        atexit.unregister(self.stop)
        if self._ending.is_set():
            return
        self._ending.set()
        self._thread.join(2 * BEAT_S)
        failure = getattr(sys, "last_value", None)  # what ends this process, if it ends by an error
        try:
            if failure is not None and not PEERS_FAULT.search(f"{type(failure).__name__} {failure}"):
                said = str(failure).strip().partition("\n")[0]
                self._publish(self.rank, f"{self.members[self.rank]} failed: {type(failure).__name__}: {said}")
            self.store.set(_beat_key(self.rank), json.dumps({"beat": LEFT, "place": "has left"}))
        except RuntimeError:
            pass  # the store has gone, and with it everybody who could read this

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending.wait(BEAT_S):
            try:
                self._look()
            except RuntimeError as error:
                if not self._ending.is_set():
                    log.error("rank %d: %s%s", self.rank, _store_lost(error), self._here())
                return

    def _look(self) -> None:
        self.place = place_of_main_thread(self.place)
        found = self._look_at_processes()
        self._tell_beat()
        found = found or self._look_at_next_rank() or self._look_for_those_who_left()
        for rank, what in found.items():
            self._publish(rank, what)
        self._read_findings()
        self._report_long_wait()

    def _look_at_processes(self) -> dict[int, str]:
        found = {}
        for member in self.neighbours:
            if member.rank in self.lost or member.rank in self.left:
                continue
            state = state_of(member.pid)
            if state is None or state[1] != member.born or state[0] in ENDED:
                self._beat_of(member.rank)  # a process that ended by itself has said so
                if member.rank not in self.left:
                    found[member.rank] = f"{member} has ended"
            elif state[0] in STOPPED:
                found[member.rank] = f"{member} is stopped, by SIGSTOP or a debugger"
        return found

    def _look_for_those_who_left(self) -> dict[int, str]:
        """Ranks that this one has waited for since they ended without an error."""
        if not self.place.waits or time.monotonic() - self.place.since < EXPECTED_S:
            return {}
        missed = sorted(self.left & set(self.place.ranks) - set(self.lost))
        return {rank: f"{self.members[rank]} has ended without an error, and others wait for it" for rank in missed}

    def _look_at_next_rank(self) -> dict[int, str]:
        now = time.monotonic()
        world = len(self.members)
        after = ((self.rank + step) % world for step in range(1, world))
        rank = next((rank for rank in after if rank not in self.lost and rank not in self.left), None)
        if rank is None:
            return {}
        beat = self._beat_of(rank).get("beat", 0)
        if rank not in self._beats or self._beats[rank][0] != beat:
            self._beats[rank] = beat, now
        elif now - self._beats[rank][1] > SILENT_S:
            silent = f"is silent since {now - self._beats[rank][1]:.0f} s: its host or process is lost, or stopped"
            return {rank: f"{self.members[rank]} {silent}"}
        return {}

    def _publish(self, rank: int, what: str) -> None:
        """Write a finding into the store, once for each rank that is lost."""
        if self.store.add(f"found/{rank}", 1) == 1:
            doing = self._beat_of(rank).get("place", "")
            number = self.store.add("findings", 1)
            self.store.set(f"finding/{number}", json.dumps([rank, f"{what}{f', {doing}' if doing else ''}"]))

    def _read_findings(self) -> None:
        count = self.store.add("findings", 0)
        for number in range(self._read + 1, count + 1):
            if not self.store.check([f"finding/{number}"]):
                return  # it is being written
            rank, what = json.loads(self.store.get(f"finding/{number}"))
            self._read = number
            self.lost.setdefault(rank, what)
            log.error("rank %d: %s%s", self.rank, what, self._here())

    def _report_long_wait(self) -> None:
        waited = time.monotonic() - self.place.since
        if not self.place.waits or waited < LONG_WAIT_S:
            self._next_report_s = LONG_WAIT_S
            return
        if waited < self._next_report_s:
            return
        self._next_report_s *= 2
        places: dict[str, list[int]] = defaultdict(list)
        for rank in range(len(self.members)):
            beat = self._beat_of(rank)
            if rank < self.rank and beat.get("waits") and beat.get("seconds", 0.0) >= LONG_WAIT_S:
                return  # a lower rank says it
            places[beat.get("place", "unknown")].append(rank)
        said = [f"{_ranks(ranks)} {place}" for place, ranks in sorted(places.items(), key=lambda entry: len(entry[1]))]
        log.warning("rank %d has waited %.0f s: %s", self.rank, waited, "; ".join(said))

    def _tell_beat(self) -> None:
        self._beat += 1
        seconds = time.monotonic() - self.place.since
        told = {"beat": self._beat, "place": self.place.words, "waits": self.place.waits, "seconds": seconds}
        self.store.set(_beat_key(self.rank), json.dumps(told))

    def _beat_of(self, rank: int) -> dict[str, Any]:
        """What a rank has told last; notes a rank that has left."""
        key = _beat_key(rank)
        told: dict[str, Any] = json.loads(self.store.get(key)) if self.store.check([key]) else {}
        if told.get("beat") == LEFT:
            self.left.add(rank)
        return told

    def _here(self) -> str:
        return f". This rank is {self.place.words}" if self.place.words else ""


def start_watch() -> RankWatch | None:
    """Watch the ranks of the default group. Collective.

    None in a job of one rank or with torch's fake backend; and, with a warning, where the job's store cannot be shared.
    """
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    rank = dist.get_rank()
    members = agree.gather(this_member(rank), None, "the processes of this job")
    store = distributed_c10d._get_default_store()
    number = store.add(f"core.rank_watch/starts/{rank}", 1)  # the same on all ranks, as all start together
    try:
        watch = RankWatch(dist.PrefixStore(f"core.rank_watch/{number}", store), list(members.values()), rank)
    except RuntimeError as error:
        log.warning("lost ranks will not be named: %s of the job cannot be shared (%s)", type(store).__name__, error)
        return None
    watch.start()
    return watch


# --- where the main thread is -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a main thread is: words, and since when (monotonic seconds). waits: True if it waits for other ranks.

    ranks: those it waits for, as far as that is known. key: tells the innermost frame; it is still there as long as
    this does not change.
    """

    words: str
    since: float
    waits: bool = False
    ranks: tuple[int, ...] = ()
    key: tuple[int, int] = (0, 0)


def place_of_main_thread(before: Place) -> Place:
    """The main thread's place now; `before` itself as long as that has not changed."""
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)
    wait = current_wait(main)
    if frame is None:
        return before
    key = (id(wait), hash(wait.began)) if wait is not None else (id(frame), frame.f_lasti)
    if key == before.key:
        return before
    if wait is None:
        return _place_in_code(frame, key)
    try:
        ranks = wait.ranks
    except KeyError:  # the wait has ended meanwhile, and its group is destroyed
        return before
    return Place(f"waiting for {wait}, ranks {_short(ranks)}", time.monotonic(), True, tuple(ranks), key)


def _place_in_code(innermost: FrameType, key: tuple[int, int]) -> Place:
    modules: list[nn.Module] = []
    backward, waits, where = False, False, ""
    frame: FrameType | None = innermost
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_call_impl" and isinstance(frame.f_locals.get("self"), nn.Module):
            modules.append(frame.f_locals["self"])
        waits = waits or code.co_filename.endswith(("distributed_c10d.py", "_functional_collectives.py"))
        backward = backward or code.co_name == "_engine_run_backward"
        if not where and "torch" not in Path(code.co_filename).parts:
            where = f"{code.co_name} ({'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno})"
        frame = frame.f_back
    words = f"in {where}" if where else ""
    if modules:
        words = f"in forward of {_path(modules[::-1])}, {words}"
    elif backward:
        words = f"in backward, {words}"
    return Place(words, time.monotonic(), waits, (), key)


def _path(nested: list[nn.Module]) -> str:
    """The innermost module's name in the outermost one."""
    root, inner = nested[0], nested[-1]
    name = next((name for name, module in root.named_modules() if module is inner), "")
    return f"{type(root).__name__}.{name}" if name else type(inner).__name__


# --- small things ----------------------------------------------------------------------------------------------------


def _machine() -> str:
    """This host, and the space in which it numbers this process: a container may have one of its own."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _store_lost(error: Exception) -> str:
    return f"the job's store does not answer, so the process that holds it has ended ({str(error).splitlines()[0]})"


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_short(ranks)}"


def _short(ranks: list[int]) -> str:
    return f"{ranks[:8]}"[1:-1] + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")

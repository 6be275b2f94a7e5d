"""RankWatch: names within seconds a rank that has ended or hangs, and reports the place of every waiting rank.

A collective waits for all ranks, and a backend does not report which one is missing. So each process runs one thread
next to the training. Every BEAT_S it publishes the main thread's place in the job's store, checks the processes of its
host, and reads the beat of the next rank. The thread calls no collective and never touches a GPU. After a Ctrl-C
another thread ends the main thread's wait (core.watch.signals).

- A process of this host that has ended or is stopped (SIGSTOP, a debugger) is found in /proc.
- A rank without beats for SILENT_S is silent: its host is lost, or the process is stopped there. If its process runs on
  this host, it is busy: a long call keeps Python's threads from running.
- Findings are appended to a list in the store. All ranks read the list, and log it with their own place.
- A rank that ends on purpose publishes that. A rank that fails because another one was lost waits until that one is
  named. So the rank that failed first is blamed, and not its followers.
- The error of a failed wait gets its message from ``account``. A wait that lasts for END_AFTER_S after a rank has ended
  can never succeed. The process is then ended, as by NCCL's watchdog.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from core.watch.flight_recorder import unfinished_collective
from core.watch.lost_rank import BACK, DEAD, MISSED, PAUSED, SILENT, LostRank, in_order_found, next_step
from core.watch.place import Place, place_in_code, place_of_main_thread
from core.watch.processes import STOPPED, RankProcess, this_member
from core.watch.prompt_store import PromptStore
from core.watch.signals import WaitEnder
from core.watch.stragglers import Stragglers, own_times
from core.watch.waiting import deadlocked_ranks, error_chain, in_short, in_words, is_peers, own_failure, waiting

BEAT_S = 0.5
SILENT_S = 6.0  # without a beat; a long call may keep a Python thread from running for seconds
LONG_WAIT_S = 20.0  # in one place, before all ranks' places are logged; doubled each time
STORE_LIMIT_S = 5.0  # for one call of the store
EXPECTED_S = 1.0  # in one wait, before a rank that has left is missed
GRACE_S = 3.0  # a process closes its connections before it counts as ended, and others may fail a little later
STUCK_S = 2.0  # in one place, before torch's flight recorder is asked for the collective
END_AFTER_S = 60.0  # in one wait after a rank has ended, before this process is ended too
LEFT_BEATS = 5  # between two checks if ranks that are waited for have left
LEAVE_S = 10.0  # for a process to exit after an error
COMPARE_BEATS = 4  # between two comparisons of all ranks' step times
LEFT_EARLY = "has left without an error, and others wait for it: it ended, or called destroy_model_parallel"
PREFIX = "core.watch.rank_watch"  # prefix of its keys in the job's store
LEFT = -1  # the last beat of a rank that has left

log = logging.getLogger(__name__)


class RankWatch:
    """Thread that watches the ranks of a job, from ``start`` to ``stop``, over a separate connection to the job's
    store.
    """

    def __init__(self, store: dist.Store, member: RankProcess, world: int) -> None:
        own = store.clone()
        own.set_timeout(timedelta(seconds=STORE_LIMIT_S))
        self.store = PromptStore(own, STORE_LIMIT_S + 1.0)
        self.rank = member.rank
        self.world = world
        self.members = {member.rank: member}  # ranks that have arrived so far
        self.started: list[RankProcess] = []  # ranks on this host that may not have arrived yet
        self.lost: dict[int, LostRank] = {}  # in the order in which it was found
        self.left: set[int] = set()  # ranks that ended on purpose
        self.busy: set[int] = set()  # running ranks of this host without new beats
        self.place = Place("", time.monotonic())
        self.unfinished = ""  # the backend's current collective, if the place has not changed for a while
        self.failed = ""  # the last wait that failed here, in words
        self.stragglers = Stragglers()
        self._visits: Counter[str] = Counter()  # to places in the store
        self._num_read: Counter[int] = Counter()  # findings about each rank that were read
        self._beats: dict[int, tuple[int, float]] = {}  # rank -> its last beat, and when this rank saw it change
        self._beat = 0
        self._arrived = 0
        self._read = 0  # findings of the store that this rank has read
        self._next_report_s = LONG_WAIT_S
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="core-rank-watch", daemon=True)
        self._at_exit: Any = None
        self._signals = WaitEnder()

    def start(self) -> None:
        """Start watching. Returns immediately, even if other ranks have not arrived."""
        self._publish_beat()  # a member has a beat
        self.store.set(f"member/{self.rank}", json.dumps(asdict(self.members[self.rank])))
        self.store.add("members", 1)
        atexit.register(self._end)
        self._at_exit = Finalize(None, self._end, exitpriority=100)  # processes of multiprocessing run no atexit
        self._thread.start()
        self._signals.start()

    def read_members(self) -> None:
        """Read which ranks have arrived."""
        if len(self.members) == self.world:
            return
        here = f"started/{self.members[self.rank].machine}"
        if self.store.check([here]):
            self.started = [RankProcess(**json.loads(line)) for line in self.store.get(here).splitlines()]
        arrived = self.store.add("members", 0)
        if arrived == self._arrived:
            return
        self._arrived = arrived
        for rank in range(self.world):
            if rank not in self.members and self.store.check([f"member/{rank}"]):
                self.members[rank] = RankProcess(**json.loads(self.store.get(f"member/{rank}")))

    def stop(self, failure: BaseException | None = None) -> None:
        """End the thread, and publish that this rank leaves and the error that ends it. May be called twice."""
        if self._ending.is_set() or os.getpid() != self.members[self.rank].pid:  # a forked process ends without it
            return
        atexit.unregister(self._end)
        if self._at_exit is not None:
            self._at_exit.cancel()
        own = own_failure(failure)
        if is_peers(failure) and not self.failed:
            self._find_lost(range(self.world))
            own = None if self.lost else in_short(failure)
        self._ending.set()
        self._signals.stop()
        self._thread.join(2 * BEAT_S)
        with suppress(RuntimeError):  # the store has ended, and with it all its readers
            if own is not None:
                self._publish(self.rank, DEAD, f"{self.members[self.rank]} failed: {own}", _place_of(failure))
            beat = {"beat": LEFT, "place": "it has left", "failed": self.failed}
            self.store.set(_beat_key(self.rank), json.dumps(beat))
        self.store.close()

    def report_failure(self, error: BaseException) -> None:
        """Log on all ranks that a call has failed here and other ranks may wait in it. This rank continues."""
        words = f"{self.members[self.rank]} failed, and others may wait for it: {in_short(error)}"
        with suppress(RuntimeError):
            self._publish(self.rank, BACK, words, _place_of(error))

    def _end(self) -> None:
        """Leave the job at process exit. After an error the process exits within LEAVE_S.

        A collective in flight would block the exit, because the interpreter waits for the thread that runs it. Only
        faulthandler's timer runs until the end of the interpreter.
        """
        failure = sys.exc_info()[1] or getattr(sys, "last_value", None)
        self.stop(failure)
        if failure is not None or self.failed:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                with suppress(OSError, ValueError):
                    stream.flush()
            faulthandler.dump_traceback_later(LEAVE_S, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115

    @property
    def neighbours(self) -> list[RankProcess]:
        """Other ranks whose processes this one can see in /proc."""
        own = self.members[self.rank]
        there = {member.rank: member for member in self.started} | dict(self.members)
        return [m for m in there.values() if m.machine == own.machine and m.rank != own.rank and m.born]

    def account(self, wait: waiting) -> tuple[str, str]:
        """Describe why a wait of this rank has failed. Takes up to GRACE_S, to find a lost rank.

        Returns the missing ranks with the places of the other ranks, and the next step if a rank has died.
        """
        self.failed = wait.failed
        others = [rank for rank in wait.ranks if rank != self.rank]
        self._find_lost(others)
        lost = dict(self.lost)
        said: dict[str, list[int]] = defaultdict(list)
        beats: dict[int, dict[str, Any]] = {}
        with suppress(RuntimeError):  # the store may have ended with its rank
            beats = self._beats_of(others)
        for rank in others:
            if rank not in lost:
                beat = beats.get(rank, {})
                said[beat.get("failed") or f"did not come: {beat.get('place', 'nothing is known')}"].append(rank)
        found = [*in_order_found(lost), *(f"{in_words(ranks)} {words}" for words, ranks in said.items())]
        return "".join(f"; {words}" for words in found), next_step(lost)

    def deadlocked_beats(self, patience_s: float) -> dict[int, int]:
        """Return the last beats of ranks that wait for each other, if this rank is one of them."""
        beats: dict[int, dict[str, Any]] = {}
        with suppress(RuntimeError):  # the store may have ended
            beats = self._beats_of(range(self.world))
        stuck = deadlocked_ranks(beats, patience_s)
        return {rank: beats[rank]["beat"] for rank in stuck} if self.rank in stuck else {}

    def ended_ranks(self, ranks: Collection[int]) -> list[int]:
        """Return the members of ``ranks`` that are known to have ended or left the job."""
        ended = {rank for rank, finding in self.lost.items() if finding.kind in (DEAD, MISSED)}
        return sorted((ended | self.left) & set(ranks))

    def visit(self, place: str) -> tuple[int, int]:
        """Count a visit of a place in the job's store; return the number of all ranks' visits and of this rank's."""
        self._visits[place] += 1
        return int(self.store.add(f"place/{place}", 1)), self._visits[place]

    def visits(self, place: str) -> int:
        """Return the number of all ranks' visits of a place in the job's store."""
        return int(self.store.add(f"place/{place}", 0))

    def _find_lost(self, others: Sequence[int]) -> None:
        """Wait for GRACE_S, or until a rank is known to be lost or all ``others`` have failed too."""
        begun = time.monotonic()
        checked = -BEAT_S
        with suppress(RuntimeError):
            self._publish_beat()
        while not self.lost and (waited := time.monotonic() - begun) < GRACE_S and self._thread.is_alive():
            if waited - checked >= BEAT_S:
                checked = waited
                with suppress(RuntimeError):
                    beats = self._beats_of([rank for rank in others if rank != self.rank])
                    # A process that was killed is seen a beat later than its connections close.
                    if waited > 3 * BEAT_S and all(beat.get("failed") for beat in beats.values()):
                        return
                    for rank in self.left & set(others):
                        self._report_missing(rank)
            time.sleep(0.05)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending.wait(BEAT_S):
            try:
                self._check_ranks()
            except RuntimeError as error:
                if not self._ending.is_set():
                    self._watch_own_host(error)

    def _watch_own_host(self, error: Exception) -> None:
        """Watch the processes of this host until the store answers again. A store that has ended never does."""
        is_late = self.store.is_silent
        why = ("is busy, stopped or out of reach" if is_late else "has ended") + f" ({str(error).splitlines()[0]})"
        log.error("rank %d: the job's store does not answer: its process %s%s", self.rank, why, self._here())
        while self.store.is_silent or not is_late:
            self._find_place()
            for rank, (kind, what) in self._check_processes().items():
                self._record_finding(rank, kind, what)
            self._end_hopeless_wait()
            if self._ending.wait(BEAT_S):
                return
        log.warning("rank %d: the job's store answers again", self.rank)

    def _find_place(self) -> None:
        self.place = place_of_main_thread(self.place)
        stuck = time.monotonic() - self.place.since > STUCK_S
        self.unfinished = unfinished_collective() if stuck else ""

    def _check_ranks(self) -> None:
        self._find_place()
        self.read_members()
        found = self._check_processes()
        self._publish_beat()
        found = found or self._check_beats()
        waits = {rank: self._beat_of(rank).get("waits", False) for rank in found}
        for rank, (kind, what) in sorted(found.items(), key=lambda entry: waits[entry[0]]):  # one that waited followed
            self._publish(rank, kind, what)
        self._report_ranks_that_left()
        self._read_findings()
        self._report_long_wait()
        self._compare_steps()
        self._end_hopeless_wait()

    def _check_processes(self) -> dict[int, tuple[str, str]]:
        found = {}
        for member in self.neighbours:
            rank = member.rank
            known = self.lost.get(rank)
            if rank in self.left or (known is not None and known.kind == DEAD):
                continue
            state = member.state
            if state is None:
                with suppress(RuntimeError):  # the store may have ended with it
                    self._beat_of(rank)  # a process that left has said so
                if rank not in self.left:
                    found[rank] = DEAD, f"{member} has ended"
            elif known is None and state in STOPPED:
                found[rank] = PAUSED, f"{member} is stopped, by SIGSTOP or a debugger"
            elif known is not None and known.kind == PAUSED and state not in STOPPED:
                found[rank] = BACK, f"{member} runs again"
        return found

    def _report_ranks_that_left(self) -> None:
        """Report ranks that have ended without an error although this one waits for them."""
        if self.place.waits and time.monotonic() - self.place.since > EXPECTED_S:
            if self._beat % LEFT_BEATS == 0:  # the next rank is checked anyway
                self._beats_of(self.place.ranks)
            for rank in sorted(self.left & set(self.place.ranks)):
                self._report_missing(rank)

    def _report_missing(self, rank: int) -> None:
        if rank not in self.lost and not self._beat_of(rank).get("failed"):  # one whose wait has failed was not first
            self._publish(rank, MISSED, f"{self.members[rank]} {LEFT_EARLY}")

    def _check_beats(self) -> dict[int, tuple[str, str]]:
        """Check the beats of the next present rank, which no other rank checks, and of silent and busy ranks."""
        now = time.monotonic()
        silent = [rank for rank, finding in self.lost.items() if finding.kind == SILENT]
        after = ((self.rank + step) % self.world for step in range(1, self.world))
        gone = self.lost.keys() | self.left | self.busy
        there = (rank for rank in after if rank in self.members and rank not in gone)
        found: dict[int, tuple[str, str]] = {}
        beats = {}
        for rank in (*silent, *self.busy.difference(silent), *itertools.islice(there, 1)):
            beat = self._beat_of(rank).get("beat", 0)
            before, since = self._beats.get(rank, (beat, now))
            beats[rank] = (beat, since if beat == before else now)
            if beat != before:
                self.busy.discard(rank)
                if rank in silent:
                    found[rank] = BACK, f"{self.members[rank]} is there again"
            elif now - since > SILENT_S and rank not in self.lost and rank not in self.busy:
                found[rank] = self._without_beats(self.members[rank], now - since)
        self._beats = beats  # a rank that is checked again starts with a full time limit
        return found

    def _without_beats(self, member: RankProcess, seconds: float) -> tuple[str, str]:
        if member in self.neighbours and member.state is not None:
            self.busy.add(member.rank)
            return BACK, (
                f"{member} runs, and has not said where it is for {seconds:.0f} s: it is busy in a call that keeps "
                "Python's threads from running, such as a long import"
            )
        return SILENT, f"{member} is silent since {seconds:.0f} s: its host or process is lost, stopped or busy"

    def _publish(self, rank: int, kind: str, what: str, place: str = "") -> None:
        """Append a finding to the store's list. All ranks use the first of several findings about one event."""
        if kind in (DEAD, PAUSED, SILENT) and not place:
            place = self._beat_of(rank).get("place", "")
        words = f"{what}{f', last seen {place}' if place else ''}"
        self.store.append("findings", json.dumps([rank, self._num_read[rank], kind, words]) + "\n")

    def _read_findings(self) -> None:
        if not self.store.check(["findings"]):
            return
        lines = self.store.get("findings").decode().splitlines()
        for line in lines[self._read :]:
            rank, number, kind, words = json.loads(line)
            if number == self._num_read[rank]:
                self._num_read[rank] += 1
                self._record_finding(rank, kind, words)
        self._read = len(lines)

    def _record_finding(self, rank: int, kind: str, words: str) -> None:
        if kind == BACK:
            self.lost.pop(rank, None)
            log.warning("rank %d: %s", self.rank, words)
            return
        self.lost[rank] = LostRank(kind, words, time.monotonic())
        log.error("rank %d: %s%s", self.rank, words, self._here())

    def _report_long_wait(self) -> None:
        waited = time.monotonic() - self.place.since
        if not self.place.waits or waited < LONG_WAIT_S:
            self._next_report_s = LONG_WAIT_S
            return
        if waited < self._next_report_s:
            return
        self._next_report_s *= 2
        places: dict[str, list[int]] = defaultdict(list)
        for rank in range(self.world):
            beat = self._beat_of(rank)
            if rank < self.rank and beat.get("waits") and beat.get("seconds", 0.0) >= LONG_WAIT_S:
                return  # a lower rank logs it
            unknown = "unknown" if rank in self.members else "not come to initialize_model_parallel"
            places[beat.get("place", unknown)].append(rank)
        fewest_first = sorted(places.items(), key=lambda entry: len(entry[1]))
        said = "; ".join(f"{in_words(ranks)} {place}" for place, ranks in fewest_first)
        log.warning("rank %d has waited %.0f s: %s", self.rank, waited, said)

    def _compare_steps(self) -> None:
        """Log ranks that are slower than the others. Only the lowest present rank does."""
        lower = any(rank not in self.lost and rank not in self.left for rank in range(self.rank))
        if self._beat % COMPARE_BEATS or lower or len(self.members) < self.world:
            return
        beats = self._beats_of([rank for rank in self.members if rank not in self.left])
        times = {rank: beat.get("own") for rank, beat in beats.items()}
        for words in self.stragglers.compare(times, self.members):
            log.warning("rank %d: %s", self.rank, words)

    def _end_hopeless_wait(self) -> None:
        fell = min((finding.seen for finding in self.lost.values() if finding.kind == DEAD), default=None)
        if fell is None or not self.place.waits:
            return
        if time.monotonic() - max(fell, self.place.since) > END_AFTER_S:
            log.critical(
                "rank %d: it waits since a rank has ended, and this cannot succeed; it is ended too%s",
                self.rank,
                self._here(),
            )
            faulthandler.dump_traceback()
            sys.stdout.flush()
            os._exit(1)

    def _publish_beat(self) -> None:
        self._beat += 1
        beat = {
            "beat": self._beat,
            "place": self._place_in_words(),
            "waits": self.place.waits,
            "for": self.place.what,
            "ranks": self.place.ranks,
            "seconds": time.monotonic() - self.place.since,
            "failed": self.failed,
            "own": own_times(),
        }
        self.store.set(_beat_key(self.rank), json.dumps(beat))

    def _beat_of(self, rank: int) -> dict[str, Any]:
        """Return the last beat of a rank, and record if the rank has left."""
        key = _beat_key(rank)
        beat: dict[str, Any] = json.loads(self.store.get(key)) if self.store.check([key]) else {}
        if beat.get("beat") == LEFT:
            self.left.add(rank)
        return beat

    def _beats_of(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return the last beats of several ranks, in one request; {} for ranks that have not arrived."""
        come = [rank for rank in ranks if rank in self.members]
        beats = self.store.multi_get([_beat_key(rank) for rank in come]) if come else []
        read: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
        read.update((rank, json.loads(beat)) for rank, beat in zip(come, beats, strict=True))
        self.left.update(rank for rank, beat in read.items() if beat.get("beat") == LEFT)
        return read

    def _here(self) -> str:
        words = self._place_in_words()
        return f". This rank is {words}" if words else ""

    def _place_in_words(self) -> str:
        return f"{self.place.words} (not ended: {self.unfinished})" if self.unfinished else self.place.words


def announce_process() -> None:
    """Publish this rank's process in the job's store, so that other ranks can name it before it has a watch."""
    member = this_member(dist.get_rank())
    with suppress(RuntimeError):  # a store that cannot be shared; start_watch warns about it
        store = dist.PrefixStore(f"{PREFIX}/1", dist.group.WORLD.get_group_store())
        store.append(f"started/{member.machine}", json.dumps(asdict(member)) + "\n")


def start_watch(stage: int) -> RankWatch | None:
    """Watch the ranks of the default group. Every rank of the group must call it, with its pipeline stage.

    Returns the started watch at once. Returns None in a job of one rank, with torch's fake backend, and, with a
    warning, if the job's store cannot be shared.
    """
    world = dist.get_world_size()
    if world == 1 or dist.get_backend() == "fake":
        return None
    rank = dist.get_rank()
    store = dist.group.WORLD.get_group_store()
    try:
        number = store.add(f"{PREFIX}/starts/{rank}", 1)  # the same on all ranks: they start equally often
        watch = RankWatch(dist.PrefixStore(f"{PREFIX}/{number}", store), this_member(rank, stage), world)
        watch.start()
    except RuntimeError as error:
        log.warning("lost ranks will not be named: %s of the job cannot be shared (%s)", type(store).__name__, error)
        return None
    return watch


def _place_of(error: BaseException | None) -> str:
    """Return the file and line at which an error was raised."""
    trace = None if error is None else error_chain(error)[-1].__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return place_in_code(trace.tb_frame)[0]


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"

"""Waits for other ranks: stored on the thread during the wait, and on the error if it fails.

``waiting`` surrounds a wait for other ranks, ``calling`` surrounds a user's call that waits. Both cost about a
microsecond if nothing fails. The rank watch reads them from a separate thread.
"""

from __future__ import annotations

import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

SHOWN = 8  # ranks shown of a long list
LOOK_S = 1.5  # between two checks of the other ranks' places, in a wait that may never end
SLICE = timedelta(seconds=LOOK_S)
PATIENCE_S = 5.0  # in one wait, before a rank counts as one that may wait forever
NEVER_SENT = 1 << 20  # tag of a message that no rank sends
RECENT = 10  # number of steps with a recorded own time
BACKENDS_WORDS = re.compile(
    "gloo|nccl|connection (closed|reset|refused)|timed out|application timeout|broken pipe|socket", re.IGNORECASE
)
ADVICE = (
    "Did a rank get fewer batches than the others, call state_dict() alone, or leave out a backward, "
    "finalize_model_grads or optimizer.step? The output of the rank that failed first says more; restart from the last "
    "checkpoint"
)


class Watch(Protocol):
    """Interface of ``RankWatch`` for waits that fail or last long."""

    @property
    def lost(self) -> Mapping[int, object]: ...
    def account(self, wait: waiting) -> tuple[str, str]: ...
    def deadlocked_beats(self, patience_s: float) -> dict[int, int]: ...
    def ended_ranks(self, ranks: Collection[int]) -> list[int]: ...
    def visit(self, place: str) -> tuple[int, int]: ...
    def visits(self, place: str) -> int: ...


_watch: Watch | None = None  # the watch of this process


def use_watch(watch: Watch | None) -> None:
    """Set this process's watch, which names lost ranks; None when it is stopped."""
    global _watch
    _watch = watch


class PeerLost(RuntimeError):
    """Error raised if a wait for other ranks fails: one has ended, does not arrive, or came with another reduction.

    Attributes:
        wait: This rank's wait; None until a ``waiting`` has set it.
    """

    wait: waiting | None = None


def is_backends(error: BaseException) -> bool:
    """Return True for an error that torch.distributed or mapped memory raises if other ranks do not answer."""
    if isinstance(error, PeerLost | dist.DistError):
        return True
    return type(error) is RuntimeError and BACKENDS_WORDS.search(str(error)) is not None


def own_failure(error: BaseException | None) -> str | None:
    """Describe the error that ends a rank, or return None if there is none or another rank has caused it."""
    if error is None or is_peers(error):
        return None
    for each in error_chain(error):
        if not isinstance(each, SystemExit) and not is_backends(each):
            return in_short(each)
    return f"exit status {error.code}" if isinstance(error, SystemExit) and error.code else None


def in_short(error: BaseException | None) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def is_peers(error: BaseException | None) -> bool:
    """Return True if a failed wait for other ranks has caused an error. A Ctrl-C during a wait does not count."""
    return error is not None and not isinstance(error, KeyboardInterrupt) and is_backends(error_chain(error)[-1])


def error_chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, the first cause last."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain


class waiting:
    """Context manager around a wait for other ranks, which raises PeerLost instead of a backend's error.

    A backend's error does not say which rank is missing. The rank watch does, and it also reads this rank's wait from
    its thread.

    Args:
        what: Purpose of the wait, such as "the reduction of" (followed by ``name``).
        group: Process group, or global ranks, of the wait.
        name: Name of the bucket, tensor or call.
        computes: True if the block also computes, so that only frames of torch.distributed in it are waits.
        advice: Next step after a failure. Waits inside this one inherit it.
    """

    __slots__ = ("advice", "began", "call", "computes", "group", "name", "outer", "thread", "waited_s", "what")

    def __init__(
        self,
        what: str,
        group: dist.ProcessGroup | Sequence[int],
        name: str = "",
        *,
        computes: bool = False,
        advice: str = "",
    ) -> None:
        self.what = what
        self.name = name
        self.group = group
        self.computes = computes
        self.advice = advice

    def __enter__(self) -> None:
        self.began = time.monotonic()
        self.thread = vars(threading.current_thread())
        self.outer = self.thread.get("core_wait")
        if self.outer is not None and not self.advice:
            self.advice = self.outer.advice
        self.thread["core_wait"] = self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self.waited_s = time.monotonic() - self.began
        try:
            if error is not None and is_backends(error) and not (isinstance(error, PeerLost) and error.wait):
                raise self._lost(error) from error
        finally:
            self.thread["core_wait"] = self.outer
            if not self.computes and (self.outer is None or self.outer.computes):
                steps_of(self.thread).waited_s += self.waited_s

    def _lost(self, error: BaseException) -> PeerLost:
        """Return the error that replaces a backend's. Takes a few seconds to find the lost rank."""
        self.call = call_of(self.thread)
        found, step = ("", "") if _watch is None else _watch.account(self)
        advice = step or self.advice or ADVICE
        lost = PeerLost(f"rank {dist.get_rank()} {self.failed} ({_reason(error)}){found}. {advice}")
        lost.wait = self
        return lost

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the group."""
        if isinstance(self.group, dist.ProcessGroup):
            return dist.get_process_group_ranks(self.group)
        return list(self.group)

    @property
    def failed(self) -> str:
        """Description of the failed wait."""
        return f"waited {self.waited_s:.1f} s for {self}{self.call}, {in_words(self.ranks)}, which failed"

    def __str__(self) -> str:
        return f"{self.what} {self.name}".strip()


def expect(ranks: Collection[int]) -> None:
    """Raise PeerLost if the rank watch knows that one of these global ranks is lost.

    Call it inside ``waiting``, before a wait that would last until its timeout.
    """
    lost = [] if _watch is None else sorted(_watch.lost.keys() & set(ranks))
    if lost:
        raise PeerLost(f"{in_words(lost)} will not come")


def complete(work: dist.Work, slack_s: float | None = 0.0) -> None:
    """Wait for a collective on CPU tensors, without a timeout while other ranks compute.

    Call it inside ``waiting``, which names the wait. The wait returns to Python every LOOK_S to handle Ctrl-C. Do not
    use it for sends and receives, whose connection gloo closes after a timeout.

    Args:
        work: The collective.
        slack_s: Time that the collective itself may take. None skips the check for ranks that wait for each other.

    Raises:
        PeerLost: If the wait can never end, because ranks wait for each other or one has left. The group's connections
            are closed first. Otherwise the collective would be paired with a later one of another rank, and block the
            exit of the process.
    """
    deadlock = DeadlockCheck(slack_s)
    while not work.is_completed():
        try:
            work.wait(SLICE)
            return
        except RuntimeError:  # the time is over, or the collective has failed, which is raised below
            if work.is_completed():
                break
            try:
                deadlock.refuse_deadlock()
            except PeerLost:
                wait = current_wait(threading.current_thread())
                if wait is not None and isinstance(wait.group, dist.ProcessGroup):
                    end_waits_of(wait.group)
                raise
    work.wait()


def end_waits_of(group: dist.ProcessGroup) -> None:
    """End all waits of this process in a gloo group by closing its connections. It cannot be used afterwards.

    gloo closes a group's connections if one of its waits times out, which also ends the other ranks' waits. A wait for
    a first connection (TORCH_GLOO_LAZY_INIT) has no timeout, so it runs in a thread.
    """
    thread = threading.Thread(target=_wait_in, args=(group,), name="core-end-waits", daemon=True)
    thread.start()
    thread.join(1.0)


def _wait_in(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError, ValueError):  # the group has no gloo backend, or has been destroyed
        other = (dist.get_rank(group) + 1) % dist.get_world_size(group)
        group.recv([torch.empty(1, device="cpu")], other, NEVER_SENT).wait(timedelta(milliseconds=1))


class DeadlockCheck:
    """Repeated check of one wait for ranks that wait for each other, with the slack of ``complete``.

    Without a watch it does nothing.
    """

    def __init__(self, slack_s: float | None = 0.0) -> None:
        self.slack_s = slack_s
        self.began = self.checked = time.monotonic()
        self.before: Mapping[int, int] = {}

    def refuse_deadlock(self) -> None:
        """Raise PeerLost if two checks in succession find that this wait can never end. Checks every LOOK_S at most."""
        if _watch is None or time.monotonic() < self.checked + 0.9 * LOOK_S:
            return
        self.checked = time.monotonic()
        patience_s = PATIENCE_S + (self.slack_s or 0.0)
        wait = current_wait(threading.current_thread())
        gone = [] if wait is None or self.checked < self.began + patience_s else _watch.ended_ranks(wait.ranks)
        if gone:  # messages that they sent before have arrived by now
            raise PeerLost(f"{in_words(gone)} left before") from None
        if self.slack_s is None:
            return
        beats = _watch.deadlocked_beats(patience_s)
        # A rank that cannot publish its place keeps its old beat, and may have left that place.
        if beats and beats.keys() == self.before.keys() and all(beats[rank] > self.before[rank] for rank in beats):
            raise PeerLost(f"{in_words(list(beats))} wait for different things, and none can continue") from None
        self.before = beats


def store_barrier(call: str, ranks: Sequence[int]) -> None:
    """Wait in the job's store until all global ranks have made a call equally often. Without a watch, do nothing.

    Call it inside ``waiting``, before the first collective of a call that one rank may make alone. Otherwise that
    collective would be paired with another one of the other ranks, and use its values or abort the process.
    """
    if _watch is None:
        return
    deadlock, pause_s = DeadlockCheck(), 0.0005
    place = f"{call} {zlib.crc32(repr(list(ranks)).encode())}"
    visits, own_visits = _watch.visit(place)
    while visits < own_visits * len(ranks):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
        deadlock.refuse_deadlock()
        if _watch.lost:
            raise PeerLost(f"lost: {in_words(list(_watch.lost))}")
        visits = _watch.visits(place)


@contextmanager
def starting(store: dist.Store, rank: int, world: int) -> Iterator[dist.Store]:
    """Return a context for the start of a job's default group, before there is a rank watch.

    Raises PeerLost with the missing ranks instead of the store's error.
    """
    try:
        store.set(f"came/{rank}", "")
        yield store
    except dist.DistError as error:
        words = "the process that holds the job's store has ended"
        with suppress(RuntimeError):
            missing = [other for other in range(world) if not store.check([f"came/{other}"])]
            words = f"{in_words(missing)} did not come" if missing else "one that came has ended"
        raise PeerLost(f"rank {rank} waited for all {world} ranks to start, and {words} ({_reason(error)})") from error


def deadlocked_ranks(beats: Mapping[int, Mapping[str, Any]], patience_s: float) -> list[int]:
    """Find ranks that wait for each other forever. Pure.

    A rank can continue if it does not wait, or not for long, or if each rank that it waits for can continue or waits
    for the same thing. A wait with unknown ranks counts as a wait for all ranks. ``beats`` has the last beat of each
    rank; a rank counts as stuck after ``patience_s`` in one wait.
    """
    stays = {
        rank: (beat["for"], beat["ranks"] or list(beats))
        for rank, beat in beats.items()
        if beat.get("waits") and beat["seconds"] >= patience_s
    }
    while True:
        freed = [
            rank for rank, wait in stays.items() if all(other not in stays or stays[other] == wait for other in wait[1])
        ]
        if not freed:
            return sorted(stays)
        for rank in freed:
            del stays[rank]


class calling:
    """Context manager around a user's call that may wait for other ranks, so that errors name the call and its step.

    Args:
        call: Name of the call.
        step: Number of the step.
    """

    __slots__ = ("call", "outer", "step", "thread")

    def __init__(self, call: str, step: int) -> None:
        self.call = call
        self.step = step

    def __enter__(self) -> None:
        self.thread = vars(threading.current_thread())
        self.outer = self.thread.get("core_call")
        self.thread["core_call"] = self
        steps = steps_of(self.thread)
        if steps.number != self.step:
            steps.turn(self.step)

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self.thread["core_call"] = self.outer


@dataclass(slots=True)
class Steps:
    """Steps of one thread."""

    number: int = 0
    began: float = 0.0
    waited_s: float = 0.0  # seconds of this step in waits for other ranks
    own_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  # seconds of steps outside such waits

    def turn(self, number: int) -> None:
        """Start step ``number``."""
        now = time.monotonic()
        if self.number:
            self.own_s.append(now - self.began - self.waited_s)
        self.number, self.began, self.waited_s = number, now, 0.0


def steps_of(thread: dict[str, object]) -> Steps:
    """Return the steps of a thread, given the thread's variables."""
    steps = thread.get("core_steps")
    if not isinstance(steps, Steps):
        steps = thread["core_steps"] = Steps()
    return steps


def add_wait(seconds: float) -> None:
    """Add seconds of waiting for other ranks to this thread's step."""
    steps_of(vars(threading.current_thread())).waited_s += seconds


def call_of(thread: dict[str, object]) -> str:
    """Describe the user's current call in a thread and its step, as " in finalize_model_grads (step 3)"."""
    call = thread.get("core_call")
    if isinstance(call, calling):
        return f" in {call.call} (step {call.step})"
    steps = steps_of(thread)
    return f" (step {steps.number})" if steps.number else ""


def forget_wait() -> None:
    """Clear this thread's wait before an error is raised that may interrupt the exit of a ``waiting``."""
    vars(threading.current_thread())["core_wait"] = None


def current_wait(thread: threading.Thread) -> waiting | None:
    """Return the innermost wait of a thread, or None."""
    wait = vars(thread).get("core_wait")
    return wait if isinstance(wait, waiting) else None


def in_words(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 3" or "ranks 1, 2". A long list ends with the number of omitted ranks."""
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks[:SHOWN]))}{more}"


def _reason(error: BaseException) -> str:
    """Return the first sentence of an error, without the location in the backend's source and without advice."""
    return re.sub(r"^\[[^]]*\] *", "", str(error).strip()).partition("\n")[0].split(". ")[0]

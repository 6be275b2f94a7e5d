"""CollectiveEvent: when one collective was launched, done and waited for, by the host's clock or a device's streams.

On CPU the host sees collectives, so marks are perf_counter seconds. On a GPU the host only queues work. There a mark is
an event on the current stream, and the end of a collective is an event on a side stream that waits for it. So neither
the host nor the model's stream waits. `resolve` turns those events into seconds after the step. They count from the
moment at which the host queued the step's first mark, so differences between marks of one step are exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

Moment = Literal["launched_s", "done_s", "wait_start_s", "wait_end_s"]


class Origin(NamedTuple):
    """The first mark of a step."""

    event: Any  # of CUDA
    host_s: float  # when the host queued it


@dataclass(slots=True)
class CollectiveEvent:
    """When one collective did what, in seconds; None for what did not happen.

    launched_s: it was queued. done_s: it was first seen done, by a look or at the end of its wait. in_flight_s: the
    last look that found it on its way. The true end lies between these two, unless end_is_exact: the wait or a stream
    saw it. wait_start_s, wait_end_s: the main thread (on CUDA: the model's stream) waited for it, and did what was left
    of it, such as a division or a copy.
    """

    name: str  # of its bucket, or its purpose
    nbytes: int
    launched_s: float | None = None
    in_flight_s: float | None = None
    done_s: float | None = None
    wait_start_s: float | None = None
    wait_end_s: float | None = None
    end_is_exact: bool = False
    marks: dict[str, tuple[Origin, Any]] = field(default_factory=dict, repr=False)  # CUDA events not yet resolved

    @property
    def label(self) -> str:
        return self.name.partition(" (")[0]

    @property
    def exposed_s(self) -> float:
        """Seconds that this rank waited for it."""
        if self.wait_start_s is None or self.wait_end_s is None:
            return 0.0
        return self.wait_end_s - self.wait_start_s


class HostClock:
    """Marks are the host's perf_counter, at once."""

    def begin_step(self) -> None:
        """Nothing: perf_counter has one origin."""

    def mark(self, event: CollectiveEvent, moment: Moment) -> None:
        setattr(event, moment, time.perf_counter())

    def look(self, event: CollectiveEvent, is_done: Callable[[], bool]) -> bool:
        """Note whether a collective is done, and return that."""
        now, done = time.perf_counter(), is_done()
        if not done:
            event.in_flight_s = now
        elif event.done_s is None:
            event.done_s = now
        return done

    def end(self, event: CollectiveEvent) -> None:
        """Note that the wait has ended. If the last look found the collective on its way, this is its end too."""
        self.mark(event, "wait_end_s")
        if event.done_s is None:
            event.done_s = event.wait_end_s
            event.end_is_exact = True


class StreamClock(HostClock):
    """Marks are events on the streams of a device.

    new_event: makes an event that can `record()` itself on the current stream and say `elapsed_time(other)` in ms.
    on_side_stream: a context in which the current stream is one that nothing else uses.
    """

    def __init__(self, new_event: Callable[[], Any], on_side_stream: Callable[[], AbstractContextManager[Any]]) -> None:
        self.new_event = new_event
        self.on_side_stream = on_side_stream
        self.origin: Origin | None = None

    def begin_step(self) -> None:
        """Count from the next mark: over hours the float milliseconds of CUDA would lose their digits."""
        self.origin = None

    def mark(self, event: CollectiveEvent, moment: Moment) -> None:
        """Note that this happens when the current stream gets here."""
        now = self.new_event()
        now.record()
        if self.origin is None:
            self.origin = Origin(now, time.perf_counter())
        # One scale an event: a gather may be launched in one step and waited for in the next.
        origin = next(iter(event.marks.values()))[0] if event.marks else self.origin
        event.marks[moment] = origin, now

    def follow(self, event: CollectiveEvent, works: Sequence[dist.Work]) -> None:
        """Have the end of a collective recorded when it comes."""
        with self.on_side_stream():
            for work in works:
                work.wait()
            self.mark(event, "done_s")
        event.end_is_exact = True

    def look(self, event: CollectiveEvent, is_done: Callable[[], bool]) -> bool:
        """Note nothing: the side stream does."""
        return is_done()

    def end(self, event: CollectiveEvent) -> None:
        self.mark(event, "wait_end_s")


def resolve(events: Iterable[CollectiveEvent]) -> None:
    """Turn stream marks into seconds. Waits for them; host marks are seconds already."""
    for event in events:
        for moment, (origin, mark) in event.marks.items():
            mark.synchronize()
            setattr(event, moment, origin.host_s + origin.event.elapsed_time(mark) / 1e3)
        event.marks.clear()


def clock_for(device: torch.device) -> HostClock:
    """The clock of a model whose gradients lie on `device`."""
    if device.type in ("cpu", "meta"):
        return HostClock()
    side = torch.Stream(device)
    return StreamClock(lambda: torch.Event(device, enable_timing=True), lambda: side)

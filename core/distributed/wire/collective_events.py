"""CollectiveEvent: times at which a collective was launched, done and waited for, from the host or device streams.

On CPU the host observes collectives, so times are perf_counter seconds. On a GPU the host only queues work. There a
launch or wait is an event on the current stream, and the end of a collective is an event on a side stream that waits
for it, so neither the host nor the model's stream waits. ``resolve`` converts these events into seconds after the step.
They count from the moment at which the host queued the step's first event, so differences within a step are exact.
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
    """First recorded event of a step."""

    event: Any  # CUDA event
    host_s: float  # when the host queued it


@dataclass(slots=True)
class CollectiveEvent:
    """Times of one collective, in seconds; None for stages that did not happen.

    It was first found done at ``done_s``, by a poll or at the end of its wait, and the true end is between
    ``in_flight_s``, the last poll that found it in flight, and ``done_s``, unless the wait or a stream recorded the end
    itself (``end_is_exact``). The main thread (on CUDA: the model's stream) waited from ``wait_start_s`` to
    ``wait_end_s``, remaining work such as a division or a copy included.
    """

    name: str  # name of its bucket or its purpose
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
        """Seconds for which this rank waited."""
        if self.wait_start_s is None or self.wait_end_s is None:
            return 0.0
        return self.wait_end_s - self.wait_start_s


class HostClock:
    """Records times of the host's perf_counter."""

    def begin_step(self) -> None:
        """Do nothing, because perf_counter has a single origin."""

    def mark(self, event: CollectiveEvent, moment: Moment) -> None:
        setattr(event, moment, time.perf_counter())

    def look(self, event: CollectiveEvent, is_done: Callable[[], bool]) -> bool:
        """Record if a collective is done, and return the result."""
        now, done = time.perf_counter(), is_done()
        if not done:
            event.in_flight_s = now
        elif event.done_s is None:
            event.done_s = now
        return done

    def end(self, event: CollectiveEvent) -> None:
        """Record the end of a wait. It is also the collective's end if the last poll found the collective in flight."""
        self.mark(event, "wait_end_s")
        if event.done_s is None:
            event.done_s = event.wait_end_s
            event.end_is_exact = True


class StreamClock(HostClock):
    """Records events on the streams of a device.

    ``new_event`` creates an event with ``record()``, on the current stream, and ``elapsed_time(other)`` in ms.
    ``on_side_stream`` returns a context whose current stream is used by nothing else.
    """

    def __init__(self, new_event: Callable[[], Any], on_side_stream: Callable[[], AbstractContextManager[Any]]) -> None:
        self.new_event = new_event
        self.on_side_stream = on_side_stream
        self.origin: Origin | None = None

    def begin_step(self) -> None:
        """Count from the next event. Over hours, CUDA's milliseconds would lose precision as floats."""
        self.origin = None

    def mark(self, event: CollectiveEvent, moment: Moment) -> None:
        """Record the time at which the current stream reaches this point."""
        now = self.new_event()
        now.record()
        if self.origin is None:
            self.origin = Origin(now, time.perf_counter())
        # One scale an event: a gather may be launched in one step and waited for in the next.
        origin = next(iter(event.marks.values()))[0] if event.marks else self.origin
        event.marks[moment] = origin, now

    def follow(self, event: CollectiveEvent, works: Sequence[dist.Work]) -> None:
        """Record the end of a collective when it happens."""
        with self.on_side_stream():
            for work in works:
                work.wait()
            self.mark(event, "done_s")
        event.end_is_exact = True

    def look(self, event: CollectiveEvent, is_done: Callable[[], bool]) -> bool:
        """Only poll: the side stream records the end."""
        return is_done()


def resolve(events: Iterable[CollectiveEvent]) -> None:
    """Convert stream events into seconds. Waits for them; host times are already seconds."""
    for event in events:
        for moment, (origin, mark) in event.marks.items():
            mark.synchronize()
            setattr(event, moment, origin.host_s + origin.event.elapsed_time(mark) / 1e3)
        event.marks.clear()


def clock_for(device: torch.device) -> HostClock:
    """Return the clock for a model with gradients on ``device``."""
    if device.type in ("cpu", "meta"):
        return HostClock()
    side = torch.Stream(device)
    return StreamClock(lambda: torch.Event(device, enable_timing=True), lambda: side)

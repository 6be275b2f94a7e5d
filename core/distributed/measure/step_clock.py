"""Step clocks: when a bucket's gradients did what, on the host or, on CUDA, on the streams.

A CPU's collectives are seen by the host, so its marks are perf_counter seconds. On CUDA the host only queues work: a
mark there is an event on the current stream, and the end of a collective is an event on a stream of its own that waits
for it, so that neither the host nor the model's stream waits. Those events become seconds after the step, when a report
is asked for (`resolve`), counted from the moment at which the host queued the step's first mark: differences between
marks of one step are exact, and beside the host's times they are early by what the stream still had to do then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from core.distributed.wire.collectives import Handle, InFlight

Moment = Literal["ready_s", "launched_s", "in_flight_s", "done_s", "wait_start_s", "wait_end_s"]


class Origin(NamedTuple):
    """The first mark of a step."""

    event: Any  # of CUDA
    host_s: float  # when the host queued it


@dataclass(slots=True)
class BucketEvent:
    """When one collective of a bucket did what, in seconds; None for what did not happen.

    ready_s: the last gradient came. launched_s: the collective was queued. done_s: it was first seen done, by a look
    from the hook of a later gradient or right before the wait, or else the wait ended; in_flight_s: the last look that
    found it on its way. Between the two lies its true end, unless
    end_is_exact: the wait saw it, or on CUDA a stream. wait_start_s, wait_end_s: the main thread (on CUDA: the model's
    stream) waited for it, and did what was left of it, such as a division or a copy.
    """

    bucket: int
    name: str
    nbytes: int
    ready_s: float | None = None
    launched_s: float | None = None
    in_flight_s: float | None = None
    done_s: float | None = None
    wait_start_s: float | None = None
    wait_end_s: float | None = None
    end_is_exact: bool = False  # was done_s told, and not looked for?
    marks: dict[str, tuple[Origin, Any]] = field(default_factory=dict, repr=False)  # CUDA events not yet resolved

    def has(self, moment: Moment) -> bool:
        """Has it happened, or been queued?"""
        return moment in self.marks or getattr(self, moment) is not None


class HostClock:
    """Marks are the host's perf_counter, at once."""

    def begin_step(self) -> None:
        """Nothing: perf_counter has one origin."""

    def mark(self, event: BucketEvent, moment: Moment) -> None:
        """This happens now."""
        setattr(event, moment, time.perf_counter())

    def follow(self, event: BucketEvent, flight: InFlight) -> None:
        """Nothing: hooks look."""

    def look(self, event: BucketEvent, flight: InFlight) -> bool:
        """Note whether a collective is done; is there nothing left to look for?"""
        if event.done_s is None:
            now = time.perf_counter()
            if flight.is_done():
                event.done_s = now
            else:
                event.in_flight_s = now if event.in_flight_s is None else max(now, event.in_flight_s)
        return event.done_s is not None

    def end(self, event: BucketEvent) -> None:
        """A collective has been waited for. If a look right before the wait found it on its way, this is its end."""
        self.mark(event, "wait_end_s")
        if event.done_s is None:
            event.done_s = event.wait_end_s
            event.end_is_exact = True


class StreamClock(HostClock):
    """Marks are events on CUDA streams.

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

    def mark(self, event: BucketEvent, moment: Moment) -> None:
        """This happens when the current stream gets here."""
        now = self.new_event()
        now.record()
        if self.origin is None:
            self.origin = Origin(now, time.perf_counter())
        # One scale an event: a gather is launched in one step and waited for in the next.
        origin = next(iter(event.marks.values()))[0] if event.marks else self.origin
        event.marks[moment] = origin, now

    def follow(self, event: BucketEvent, flight: InFlight) -> None:
        """Have the end of a collective recorded when it comes. What `flight.wait()` does besides is left to it."""
        with self.on_side_stream():
            for work in _works_of(flight):
                work.wait()
            self.mark(event, "done_s")
        event.end_is_exact = True

    def look(self, event: BucketEvent, flight: InFlight) -> bool:
        """The side stream knows."""
        return True

    def end(self, event: BucketEvent) -> None:
        """The model's stream has waited for a collective."""
        self.mark(event, "wait_end_s")


def resolve(events: Iterable[BucketEvent]) -> None:
    """Turn stream marks into seconds. Waits for them; host marks are seconds already."""
    for event in events:
        for moment, (origin, mark) in event.marks.items():
            mark.synchronize()
            setattr(event, moment, origin.host_s + origin.event.elapsed_time(mark) / 1e3)
        event.marks.clear()


def _works_of(flight: InFlight | None) -> list[dist.Work]:
    """The backend's part of a collective."""
    return [*_works_of(flight.first), *flight.works] if isinstance(flight, Handle) else []


def clock_for(device: torch.device) -> HostClock:
    """The clock of a model whose gradients lie on `device`."""
    if device.type != "cuda":
        return HostClock()
    side = torch.cuda.Stream(device)
    return StreamClock(lambda: torch.cuda.Event(enable_timing=True), lambda: torch.cuda.stream(side))

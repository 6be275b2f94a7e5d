"""StepTrace: one rank's activity in one step, as values that can be sent and drawn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.profiler import record_function

from core.distributed.wire.collective_events import CollectiveEvent, resolve


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of the main thread's time, in perf_counter seconds."""

    name: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class StepTrace:
    """Spans of one step on one rank, and the collectives of its gradient buckets and, if sharded, parameter buckets."""

    rank: int
    step: int
    spans: list[Span] = field(default_factory=list)
    buckets: list[CollectiveEvent] = field(default_factory=list)
    gathers: list[CollectiveEvent] = field(default_factory=list)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        try:
            with record_function(f"core::{name}"):  # in torch's profiler
                yield
        finally:
            self.spans.append(Span(name, start, time.perf_counter()))

    def settle(self) -> None:
        """Convert the marks of a completed step to seconds, waiting for a GPU, and drop gathers of earlier steps."""
        resolve((*self.buckets, *self.gathers))
        self.gathers = [event for event in self.gathers if (event.wait_end_s or 0.0) >= self.start_s]

    @property
    def start_s(self) -> float:
        """Time when the step began."""
        return min(span.start_s for span in self.spans) if self.spans else min(self._marks())

    @property
    def end_s(self) -> float:
        """Time when the step ended."""
        return max(span.end_s for span in self.spans) if self.spans else max(self._marks())

    def _marks(self) -> list[float]:
        marks = [(e.launched_s, e.done_s, e.wait_end_s) for e in (*self.buckets, *self.gathers)]
        return [mark for event in marks for mark in event if mark is not None] or [0.0]

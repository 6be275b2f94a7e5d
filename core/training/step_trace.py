"""StepTrace: what one rank did when in one step, as values that travel and can be drawn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from core.distributed.bucket import BucketEvent


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of the main thread's time, in perf_counter seconds."""

    name: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class StepTrace:
    """The spans of one step on one rank, and the collectives of its buckets."""

    rank: int
    step: int
    spans: list[Span] = field(default_factory=list)
    buckets: list[BucketEvent] = field(default_factory=list)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(name, start, time.perf_counter()))

    @property
    def start_s(self) -> float:
        """When the step began."""
        return min(span.start_s for span in self.spans)

    @property
    def end_s(self) -> float:
        """When the step ended."""
        return max(span.end_s for span in self.spans)

"""Overlap of communication with computation in one step, measured from the events of its collectives, and its table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core.distributed.wire.collective_events import CollectiveEvent


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication of one kind in one step on this rank, in milliseconds.

    Args:
        flight_ms: Time with at least one collective in flight; overlapping collectives count once.
        exposed_ms: Time that the main thread (on CUDA: the model's stream) waited.
        seen_late_ms: Upper bound of the error in flight_ms. The end of a collective that no rank waited for is detected
            at the next poll (0 on CUDA).
    """

    flight_ms: float = 0.0
    exposed_ms: float = 0.0
    seen_late_ms: float = 0.0

    @property
    def hidden_share(self) -> float:
        """Share of the time in flight that no rank waited for; 0 if nothing was in flight."""
        return _share(self.exposed_ms, self.flight_ms)

    @property
    def hidden_share_at_least(self) -> float:
        """Lower bound of ``hidden_share``: every collective ended right after the last poll that found it in flight."""
        return _share(self.exposed_ms, self.flight_ms - self.seen_late_ms)


def measure_overlap(events: Sequence[CollectiveEvent]) -> Overlap:
    """Add up the collectives of one step. Collectives that were never launched or never ended are ignored."""
    longest, shortest = [], []
    for event in events:
        if event.launched_s is not None and event.done_s is not None:
            # It ended after the last poll that found it in flight. Without a poll it may have ended at once.
            least = event.done_s if event.end_is_exact else event.in_flight_s or event.launched_s
            longest.append((event.launched_s, event.done_s))
            shortest.append((event.launched_s, least))
    flight_s = covered(longest)
    return Overlap(
        flight_ms=1e3 * flight_s,
        exposed_ms=1e3 * sum(event.exposed_s for event in events),
        seen_late_ms=1e3 * (flight_s - covered(shortest)),
    )


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of a union of [start, end) intervals. Those that end before they start are empty."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _share(exposed_ms: float, flight_ms: float) -> float:
    return min(1.0, max(0.0, 1.0 - exposed_ms / flight_ms)) if flight_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """Reductions of a step, and the parameter gathers that were last waited for, in launch order."""

    reductions: tuple[CollectiveEvent, ...]
    gathers: tuple[CollectiveEvent, ...] = ()

    @property
    def of_reductions(self) -> Overlap:
        """Overlap of the gradients' collectives."""
        return measure_overlap(self.reductions)

    @property
    def of_gathers(self) -> Overlap:
        """Overlap of the parameters' collectives."""
        return measure_overlap(self.gathers)

    def table(self) -> str:
        """Return totals, then one line for each collective. Times are in ms since the first launch of its kind."""
        kinds = [("reductions", self.reductions), ("gathers", self.gathers)]
        kinds = [(name, events) for name, events in kinds if events]
        lines = [f"{'':<24}{'in flight ms':>14}{'seen late ms':>14}{'exposed ms':>12}{'hidden':>8}{'at least':>10}"]
        for name, events in kinds:
            total = measure_overlap(events)
            lines.append(
                f"{name:<24}{total.flight_ms:>14.2f}{total.seen_late_ms:>14.2f}{total.exposed_ms:>12.2f}"
                f"{total.hidden_share:>8.0%}{total.hidden_share_at_least:>10.0%}"
            )
        for name, events in kinds:
            lines += ["", f"{name:<24}{'KiB':>10}{'launched':>10}{'done':>9}{'waited':>9}{'exposed':>9}"]
            origin = min((event.launched_s for event in events if event.launched_s is not None), default=0.0)
            for event in events:
                times = [event.launched_s, event.done_s, event.wait_end_s]
                cells = ["-" if t is None else f"{1e3 * (t - origin):.2f}" for t in times]
                lines.append(
                    f"{event.label:<24}{event.nbytes / 1024:>10.1f}{cells[0]:>10}{cells[1]:>9}{cells[2]:>9}"
                    f"{1e3 * event.exposed_s:>9.2f}"
                )
        return "\n".join(lines)

"""The table of what was hidden of a step's collectives, and of parameter gathers."""

from __future__ import annotations

from dataclasses import dataclass

from core.distributed.wire.collective_events import CollectiveEvent
from core.distributed.wire.overlap import Overlap, measure_overlap


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """A step's reductions, and the parameter gathers that were waited for last, each in the order of their launch."""

    reductions: tuple[CollectiveEvent, ...]
    gathers: tuple[CollectiveEvent, ...] = ()

    @property
    def of_reductions(self) -> Overlap:
        """Of the gradients' collectives."""
        return measure_overlap(self.reductions)

    @property
    def of_gathers(self) -> Overlap:
        """Of the parameters' collectives."""
        return measure_overlap(self.gathers)

    def table(self) -> str:
        """Totals, then one line a collective; times in ms since the first launch of its kind."""
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

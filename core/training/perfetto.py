"""The trace file for ui.perfetto.dev and chrome://tracing: one process a rank, one row a bucket, one a gather."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.training.step_trace import StepTrace

MAIN_ROW = 0
GATHER_ROWS = 100_000  # rows of gathers come below those of buckets
MICROSECONDS = 1e6


def write_trace(path: Path, traces: Sequence[StepTrace]) -> None:
    """Write the steps of all ranks as Chrome trace events. Clocks of ranks on one machine are the same clock."""
    path.write_text(json.dumps({"traceEvents": trace_events(traces), "displayTimeUnit": "ms"}))


def trace_events(traces: Sequence[StepTrace]) -> list[dict[str, Any]]:
    """Chrome trace events: spans and waits on the main row, each bucket's collectives on a row of its own."""
    if not traces:
        return []
    launches = [event.launched_s for trace in traces for event in trace.gathers if event.launched_s is not None]
    origin = min([*launches, *(trace.start_s for trace in traces)])  # a report may hold gathers of the step before
    events: list[dict[str, Any]] = []
    named: set[tuple[int, int]] = set()

    def add(rank: int, row: int, name: str, start_s: float | None, end_s: float | None, **details: Any) -> None:
        if start_s is None or end_s is None:
            return
        events.append(
            {
                "name": name,
                "ph": "X",
                "ts": (start_s - origin) * MICROSECONDS,
                "dur": max(0.0, end_s - start_s) * MICROSECONDS,
                "pid": rank,
                "tid": row,
                "args": details,
            }
        )

    def name_row(rank: int, row: int, name: str) -> None:
        if (rank, row) not in named:
            named.add((rank, row))
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}})

    for trace in traces:
        name_row(trace.rank, MAIN_ROW, f"rank {trace.rank} main thread")
        for span in trace.spans:
            add(trace.rank, MAIN_ROW, span.name, span.start_s, span.end_s, step=trace.step)
        for collectives, first_row in ((trace.buckets, MAIN_ROW + 1), (trace.gathers, GATHER_ROWS)):
            names = list(dict.fromkeys(event.name for event in collectives))
            for event in collectives:
                row = first_row + names.index(event.name)
                name_row(trace.rank, row, event.label)
                details = {"step": trace.step, "bucket": event.name, "bytes": event.nbytes}
                add(trace.rank, row, "in flight", event.launched_s, event.done_s, **details)
                add(trace.rank, MAIN_ROW, f"wait for {event.label}", event.wait_start_s, event.wait_end_s, **details)
    return events

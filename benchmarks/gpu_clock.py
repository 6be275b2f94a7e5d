"""The clock of `python -m benchmarks gpu`: arms in turns, by CUDA events on a GPU and by perf_counter elsewhere."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.step_figures import Rounds, flat, ratio_by_round, ratio_of_medians, spread

SEED = 1


def nothing() -> None:
    """Do nothing before a lap."""


class Watch:
    """Seconds of each of several calls that follow one another; `before` each of them something may run untimed."""

    def laps(self, call: Callable[[], Any], count: int, before: Callable[[], Any] = nothing) -> list[float]:
        """Call it `count` times."""
        seconds = []
        for _ in range(count):
            before()
            begun = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begun)
        return seconds


class CudaWatch(Watch):
    """The device's seconds from begin to end of a call, idle ones included; nothing is waited for but the last call.

    new_event: as torch.cuda.Event; synchronize: as torch.cuda.synchronize.
    """

    def __init__(
        self,
        new_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True),
        synchronize: Callable[[], None] = torch.cuda.synchronize,
    ) -> None:
        self.new_event = new_event
        self.synchronize = synchronize

    def laps(self, call: Callable[[], Any], count: int, before: Callable[[], Any] = nothing) -> list[float]:
        """Call it `count` times."""
        self.synchronize()
        marks = [(self.new_event(), self.new_event()) for _ in range(count)]
        for begin, end in marks:
            before()
            begin.record()
            call()
            end.record()
        self.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def watch_for(device: torch.device) -> Watch:
    """The watch of a device."""
    return CudaWatch() if device.type == "cuda" else Watch()


def in_turns(
    calls: Mapping[str, Callable[[], Any]],
    watch: Watch,
    *,
    rounds: int,
    laps: int,
    before: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, Rounds]:
    """Seconds by name, [round][lap]: in every round each has a turn of `laps`, in another order.

    One more lap begins each turn and is not counted: caches and the allocator are the arm's that was before.
    before: by name, what runs untimed before each call.
    """
    seconds: dict[str, list[list[float]]] = {name: [] for name in calls}
    order = random.Random(SEED)
    for _ in range(rounds):
        for name in order.sample(sorted(calls), len(calls)):
            seconds[name].append(watch.laps(calls[name], laps + 1, (before or {}).get(name, nothing))[1:])
    return dict(seconds)


@dataclass(frozen=True)
class Row:
    """A line of a table: milliseconds with quartiles, the ratio to the first arm, and what else a section says."""

    name: str
    ms: float
    low_ms: float
    high_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    extra: dict[str, Any]


def rows_of(seconds: Mapping[str, Rounds], base: str, extra: Mapping[str, dict[str, Any]] | None = None) -> list[Row]:
    """A row an arm. The ratio is of medians; its quartiles are those of the rounds, whose arms ran seconds apart."""
    rows = []
    for name, rounds in seconds.items():
        times, ratios = spread(flat(rounds)), ratio_by_round(rounds, seconds[base])
        rows.append(
            Row(
                name,
                1e3 * times.median,
                1e3 * times.low,
                1e3 * times.high,
                ratio_of_medians(rounds, seconds[base]),
                ratios.low,
                ratios.high,
                dict((extra or {}).get(name, {})),
            )
        )
    return rows


def table(rows: Sequence[Row], title: str) -> str:
    """Rows as text; the extra columns are those of the first row that has any."""
    columns = next((list(row.extra) for row in rows if row.extra), [])
    width = max(len(title), *(len(row.name) for row in rows))
    head = f"{title:<{width}} {'ms':>9} {'(quartiles)':>19} {'ratio':>6} {'by round':>14}"
    lines = [head + "".join(f" {column:>{max(8, len(column))}}" for column in columns)]
    for row in rows:
        line = (
            f"{row.name:<{width}} {row.ms:>9.3f} {f'({row.low_ms:.3f}..{row.high_ms:.3f})':>19} {row.ratio:>6.3f} "
            f"{f'({row.ratio_low:.3f}..{row.ratio_high:.3f})':>14}"
        )
        for column in columns:
            value = row.extra.get(column, "")
            text = f"{value:.3f}" if isinstance(value, float) else str(value)
            line += f" {text:>{max(8, len(column))}}"
        lines.append(line.rstrip())
    return "\n".join(lines)

"""Add the sketches of all ranks to sketches of full tensors. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from core.verify.record.file import TABLES, Entry, RecordedStep

Key = tuple[str, str]  # table of the recording, name
REPLICATED = 1e-3  # sketches of tensor-parallel ranks that are this close are of one tensor, not of its parts


class Row(NamedTuple):
    """One rank's entry of a table.

    Attributes:
        part: Which part of a parameter it is; ranks that hold the same part send the same number.
        order: Position in the order of forward.
        entry: The sums.
    """

    part: int
    order: float
    entry: Entry


def merged(everyone: Sequence[Any], step: int, rates: tuple[float, ...]) -> RecordedStep:
    """Add the ranks' sketches. Pure.

    Tensor-parallel ranks may hold one tensor or parts of it; equal sketches are of one. A container of which pipeline
    stages hold parts has the outputs of its last stage. Parts of parameters that several ranks hold count once.
    """
    by_name: dict[Key, dict[int, dict[int, list[Row]]]] = {}
    for data_rank, _, rows in everyone:
        for key, stage, row in rows:
            by_name.setdefault(key, {}).setdefault(stage, {}).setdefault(data_rank, []).append(row)
    tables: dict[str, list[tuple[float, str, Entry]]] = {name: [] for name in TABLES}
    for (table, name), stages in by_name.items():
        ranks = stages[max(stages)]
        order = min(row.order for found in ranks.values() for row in found)
        if table in ("data", "outputs", "gradients"):
            entries = [row.entry for found in ranks.values() for row in _distinct(found)]
        else:
            entries = list({row.part: row.entry for found in ranks.values() for row in found}.values())
        tables[table].append((order, name, _added(entries)))
    ordered = {table: {name: entry for _, name, entry in sorted(found)} for table, found in tables.items()}
    return RecordedStep(step, max(eps for _, eps, _ in everyone), rates, **ordered)


def _distinct(rows: Sequence[Row]) -> Sequence[Row]:
    first = rows[0].entry
    room = REPLICATED * max(map(abs, first.numbers), default=0.0)
    alike = all(
        row.entry.digest == first.digest
        or (
            first.width >= 0 and all(abs(a - b) <= room for a, b in zip(row.entry.numbers, first.numbers, strict=False))
        )
        for row in rows
    )
    return rows[:1] if alike else rows


def _added(entries: Sequence[Entry]) -> Entry:
    widths = {entry.width for entry in entries}
    numbers = tuple(
        map(sum, zip(*(entry.numbers for entry in entries), strict=False))
    )  # the shortest, if some are split
    digest = sum(entry.digest for entry in entries) % 2**64
    return Entry(sum(entry.numel for entry in entries), widths.pop() if len(widths) == 1 else -2, digest, numbers)

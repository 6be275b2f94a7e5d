"""A plan in words: a table of memory for one rank of each kind."""

from __future__ import annotations

from collections.abc import Sequence

from core.plan.run_memory import RankMemory
from core.plan.state_bytes import STATE_KINDS
from core.plan.step_memory import STEP_KINDS

KINDS = (*STATE_KINDS, *STEP_KINDS)


def gib(nbytes: float) -> str:
    """'1.50 GiB'; MiB and KiB where that says more."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def shown(memories: Sequence[RankMemory]) -> list[RankMemory]:
    """First, middle and last stage, and the one that holds most."""
    wanted = {0, len(memories) // 2, len(memories) - 1}
    most = max(range(len(memories)), key=lambda place: memories[place].peak)
    return [memories[place] for place in sorted({*wanted, most})]


def memory_table(memories: Sequence[RankMemory], room: int | None) -> str:
    """Bytes by kind at the highest point of a step, a column a rank; room: what one rank may use."""
    columns = shown(memories)
    head = [f"rank {memory.rank} (stage {', '.join(map(str, memory.stages))})" for memory in columns]
    rows = [("", head)]
    rows += [
        (kind, [gib(memory.held.get(kind, 0)) for memory in columns])
        for kind in KINDS
        if any(memory.held.get(kind, 0) for memory in columns)
    ]
    rows.append(("highest", [gib(memory.peak) for memory in columns]))
    if room is not None:
        rows.append(("left", [gib(room - memory.peak) for memory in columns]))
    first = max(len(name) for name, _ in rows)
    widths = [max(len(cells[place]) for _, cells in rows) for place in range(len(columns))]
    return "\n".join(
        (name.ljust(first) + "".join(cell.rjust(width + 2) for cell, width in zip(cells, widths, strict=True))).rstrip()
        for name, cells in rows
    )

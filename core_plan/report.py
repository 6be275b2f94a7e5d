"""A plan as text: tables of memory, time and traffic."""

from __future__ import annotations

from collections.abc import Sequence

from core_plan.run_memory import RankMemory
from core_plan.state_bytes import STATE_KINDS
from core_plan.step_memory import ACTIVATIONS, STEP_KINDS
from core_plan.step_time import SHARES, StepTime

COMMUNICATORS = "communicators"
KINDS = (*STATE_KINDS, COMMUNICATORS, *STEP_KINDS)


def gib(nbytes: float) -> str:
    """Format bytes such as '1.50 GiB', or in MiB or KiB if smaller."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def shown(memories: Sequence[RankMemory]) -> list[RankMemory]:
    """Return the first, middle and last stage, and the one with the highest peak."""
    wanted = {0, len(memories) // 2, len(memories) - 1}
    most = max(range(len(memories)), key=lambda place: memories[place].peak)
    return [memories[place] for place in sorted({*wanted, most})]


def memory_table(memories: Sequence[RankMemory], room: int, headroom: int) -> str:
    """Format the bytes by kind at the highest point of a step, one column per rank.

    Offloaded bytes come last and use no device memory: they are in files, or with a GPU on the host. A rank may use
    ``room`` bytes, and ``headroom`` bytes more are kept free.
    """
    columns = shown(memories)
    head = [f"rank {memory.rank} (stage {', '.join(map(str, memory.stages))})" for memory in columns]
    rows = [("", head)]
    for kind in KINDS:
        if any(memory.held.get(kind, 0) for memory in columns):
            rows.append((kind, [gib(memory.held.get(kind, 0)) for memory in columns]))
            rows += _rows_of_parts(columns) if kind == ACTIVATIONS else []
    rows.append(("highest", [gib(memory.peak) for memory in columns]))
    if headroom:
        rows.append(("headroom for the allocator", [gib(headroom)] * len(columns)))
    rows.append(("left", [gib(room - memory.peak) for memory in columns]))
    for where, offloaded in (
        ("in files", [memory.files for memory in columns]),
        ("on the host", [memory.host for memory in columns]),
    ):
        kinds = [kind for kind in STATE_KINDS if any(held.get(kind, 0) for held in offloaded)]
        rows += [(f"{where}: {kind}", [gib(held.get(kind, 0)) for held in offloaded]) for kind in kinds]
    first = max(len(name) for name, _ in rows)
    widths = [max(len(cells[place]) for _, cells in rows) for place in range(len(columns))]
    return "\n".join(
        (name.ljust(first) + "".join(cell.rjust(width + 2) for cell, width in zip(cells, widths, strict=True))).rstrip()
        for name, cells in rows
    )


def _rows_of_parts(columns: Sequence[RankMemory]) -> list[tuple[str, list[str]]]:
    """Return rows that explain activations: microbatches in flight per stage, and copies of each part's saved bytes."""
    in_flight = [", ".join(map(str, memory.highest.in_flight.values())) for memory in columns]
    counts = [{(saved.part, saved.each): saved.copies for saved in memory.activations} for memory in columns]
    parts = dict.fromkeys(part for count in counts for part in count if part[1])
    return [
        ("  microbatches in flight", in_flight),
        *(
            (f"  {name}", [f"{count[name, each]} x {gib(each)}" if count.get((name, each)) else "" for count in counts])
            for name, each in parts
        ),
    ]


def time_table(time: StepTime, ranks: int, *, on_cpu: bool) -> str:
    """Format the speed of a step and its seconds by kind. ``ranks`` is the number of ranks of the job."""
    each = "rank" if on_cpu else "GPU"
    lines = [
        f"a step takes {time.seconds:.3g} s: {time.tokens_per_s:,.0f} tokens a second; each {each} "
        f"{time.tokens_per_s / ranks:,.0f} tokens a second, {time.flops_per_s / ranks / 1e12:.3g} TFLOP/s, "
        f"MFU {time.mfu:.1%}"
    ]
    lines += [f"  {words:<24}{getattr(time, name):>10.3g} s" for name, words in SHARES.items()]
    return "\n".join(lines)


def traffic_table(time: StepTime, *, has_seconds: bool) -> str:
    """Format the bytes that one rank sends over each group, and the time if known; '' for a single rank."""
    totals: dict[tuple[str, str, str], list[float]] = {}
    for row in time.communication:
        total = totals.setdefault((row.group, row.collective, row.link), [0, 0, 0.0])
        for place, value in enumerate((row.calls, row.nbytes, row.seconds)):
            total[place] += value
    lines = ["one rank of the slowest stage sends in a step"] if totals else []
    for (group, collective, link), (calls, nbytes, seconds) in totals.items():
        took = f"{seconds:>10.3g} s" if has_seconds else ""
        where = "inside a machine" if link == "inside" else "between machines"
        lines.append(f"  {group:<8}{collective:<16}{calls:>8.0f} calls{gib(nbytes):>13}{took} {where}")
    return "\n".join(lines)

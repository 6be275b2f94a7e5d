"""Plan and results of a run of `python -m benchmarks steps`: values, and how arms share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.arms import MODULES, Arm
from benchmarks.interleave import Limits
from benchmarks.workloads import Workload

TOLERANCE = 2e-4  # of the losses, relative
RANK_BYTES = 120e6  # what a rank has of the interpreter for itself, without the pages that it shares with its server
USED = 0.85  # of the memory that is free when a workload begins; the rest is for what was not foreseen


@dataclass(frozen=True)
class Plan:
    """Amount of measuring.

    starts: of the processes of every arm. rounds: turns of an arm in each of them; None is what the workload says.
    steps_per_turn: that are counted, or fewer, at least one, where they would take more than `turn_s` seconds.
    gate_steps: at the begin of the first start, which must have the right losses; gate_steps_again: of the others.
    memory_steps: the last of them, during which memory is looked at. memory_bytes: for all arms that are alive
    together; None is a share of what the machine has left.
    """

    ranks: int = 2
    accumulation: int = 1
    starts: int = 3
    rounds: int | None = None
    steps_per_turn: int = 3
    turn_s: float = 4.0
    gate_steps: int = 5
    gate_steps_again: int = 4
    memory_steps: int = 2
    memory_bytes: float | None = None
    modules: tuple[str, ...] = MODULES
    limits: Limits = field(default_factory=Limits)

    def gate_of(self, start: int) -> int:
        """Steps before the first turn of a start."""
        return self.gate_steps if start == 0 else self.gate_steps_again

    def rounds_of(self, workload: Workload) -> int:
        """Turns of each arm in a start."""
        return workload.rounds if self.rounds is None else self.rounds

    def counted_steps(self, step_s: float) -> int:
        """Of a turn, for an arm whose steps take so long."""
        return max(1, min(self.steps_per_turn, int(self.turn_s / step_s)))


@dataclass
class Turns:
    """Raw results of one start of an arm's processes.

    outcome: 'measured', 'wrong loss', 'failed', 'absent'; of controls 'caught' or 'NOT CAUGHT'. losses: of the first
    steps, the mean over ranks. wall_s, cpu_s: [round][step], the mean over ranks. memory: bytes [rank].
    """

    name: str
    start: int
    batch: int
    outcome: str = "measured"
    reason: str = ""
    losses: list[float] = field(default_factory=list)
    deviation: float | None = None
    wall_s: list[list[float]] = field(default_factory=list)
    cpu_s: list[list[float]] = field(default_factory=list)
    memory_before: list[int] = field(default_factory=list)
    memory_peak: list[int] = field(default_factory=list)
    memory_samples: int = 0


@dataclass
class Row:
    """One arm of the table: what it is, what became of it, and its turns in each start (the baseline's in each batch).

    outcome: the first of its starts' that is not 'measured', for the reason given.
    """

    name: str
    about: str
    stage: str
    kind: str
    outcome: str = "measured"
    reason: str = ""
    starts: list[Turns] = field(default_factory=list)

    def add(self, turns: Turns) -> None:
        """Take in one start."""
        self.starts.append(turns)
        if self.outcome == "measured" and turns.outcome != "measured":
            self.outcome = turns.outcome
            self.reason = turns.reason if turns.start == 0 else f"in start {turns.start + 1}: {turns.reason}"


def row_of(arm: Arm) -> Row:
    """A row that is still empty."""
    return Row(arm.name, arm.about, arm.stage, arm.kind)


def arm_bytes(arm: Arm, numel: int, ranks: int) -> float:
    """Memory of all ranks of an arm at its peak, estimated. numel: parameters of the model."""
    return ranks * (RANK_BYTES + arm.copies * 4 * numel)


def free_bytes() -> float:
    """Memory that this machine has left for a run."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 4e9
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return USED * 1024.0 * int(lines["MemAvailable"].split()[0])


def batches_of(arms: Sequence[Arm], baseline: Arm, workload: Workload, ranks: int, limit: float) -> list[list[Arm]]:
    """Arms in their order, as many together as `limit` bytes hold, the baseline first in each batch; at least one more.

    ValueError where not even that fits.
    """
    numel = workload.numel()
    first = arm_bytes(baseline, numel, ranks)
    batches: list[list[Arm]] = []
    left = 0.0
    for arm in arms:
        needed = arm_bytes(arm, numel, ranks)
        if first + needed > limit:
            raise ValueError(
                f"{arm.name!r} and {baseline.name!r} need about {(first + needed) / 2**30:.1f} GiB together on "
                f"{workload.name}, and there are {limit / 2**30:.1f}; leave the arm out (--arms), the workload "
                "(--workloads), or allow more (--memory)"
            )
        if not batches or needed > left:
            batches.append([baseline])
            left = limit - first
        batches[-1].append(arm)
        left -= needed
    return batches or [[baseline]]

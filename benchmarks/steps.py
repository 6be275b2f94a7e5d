"""The time, processor time and memory of a training step: torch's wrappers, other frameworks and ours, in one run.

Every arm has rank processes of its own and works while all others wait; turns go round in a shuffled order. Where not
all arms fit into memory at once they run in batches, the baseline (torch DDP at its defaults) in each; ratios are to
the baseline of the same batch. An arm's figures count only if the losses of its first steps are those of one process on
the same global batch; arms that are wrong on purpose show that this would be noticed, and if one is not the exit status
is 1. See benchmarks/arms.py for what an arm is and benchmarks/workloads.py for what they train.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.arms import MODULES, Arm, all_arms
from benchmarks.arms_torch import BASELINE, REFERENCE
from benchmarks.interleave import ArmAbsent, ArmFailure, Crew, Job, Limits, StepSample, Workshop
from benchmarks.process_memory import PeakWatch, resident_bytes
from benchmarks.report import add_json, circumstances, write_json
from benchmarks.step_figures import deviation, mean_over_ranks
from benchmarks.step_table import draw_ratios, table
from benchmarks.workloads import TABLE, WORKLOADS, Workload

TOLERANCE = 2e-4
SEED = 1
WARMING_STEPS = 1  # not counted at the begin of a turn: the arms before have had the caches, and a processor sleeps
RANK_BYTES = 300e6  # an interpreter with torch, what a rank takes beside the model's states
STATES = 9  # copies of the parameters that the hungriest arm holds at its peak


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    ranks: int = 2
    accumulation: int = 1
    rounds: int = 8
    steps_per_turn: int = 3
    gate_steps: int = 5
    memory_steps: int = 3
    at_once: int | None = None
    modules: tuple[str, ...] = MODULES
    method: str = "spawn"
    limits: Limits = field(default_factory=Limits)


@dataclass
class Row:
    """What became of one arm: everything raw.

    outcome: 'measured', 'wrong loss', 'failed', 'absent'; for controls 'caught' or 'NOT CAUGHT'. losses: of the first
    steps, the mean over ranks. wall_s, cpu_s: [round][step], the mean over ranks. memory: bytes [rank].
    """

    name: str
    about: str
    stage: str
    kind: str
    outcome: str = "measured"
    reason: str = ""
    batch: int = -1
    losses: list[float] = field(default_factory=list)
    deviation: float | None = None
    wall_s: list[list[float]] = field(default_factory=list)
    cpu_s: list[list[float]] = field(default_factory=list)
    memory_before: list[int] = field(default_factory=list)
    memory_peak: list[int] = field(default_factory=list)
    memory_samples: int = 0

    def add(self, samples: Sequence[Sequence[StepSample]]) -> None:
        """Append a round: [rank][step]."""
        self.wall_s.append(mean_over_ranks([[one.wall_s for one in rank] for rank in samples]))
        self.cpu_s.append(mean_over_ranks([[one.cpu_s for one in rank] for rank in samples]))


def row_of(arm: Arm) -> Row:
    """A row that is still empty."""
    return Row(arm.name, arm.about, arm.stage, arm.kind)


def run_workload(workload: Workload, arms: Sequence[Arm], plan: Plan) -> dict[str, Any]:
    """Measure `arms` on a workload; rows of all of them and of the controls, and the losses of the reference."""
    controls = [arm for arm in all_arms(plan.modules)[0].values() if arm.kind == "control"]
    rows = {arm.name: row_of(arm) for arm in [*arms, *controls]}
    _say(f"{workload.name}: {workload.sizes()}")
    with Workshop(plan.method) as workshop:
        reference = _gate_controls(workshop, workload, controls, rows, plan)
    wanted = []
    for arm in arms:
        if reason := arm.why_absent():
            rows[arm.name].outcome, rows[arm.name].reason = "absent", reason
        elif arm.name != BASELINE:
            wanted.append(arm)
    baselines = []
    size = (plan.at_once or fitting_at_once(workload, plan.ranks)) - 1
    batches = [wanted[first : first + size] for first in range(0, len(wanted), size)] or [[]]
    for number, others in enumerate(batches):
        _say(
            f"{workload.name}: batch {number + 1} of {len(batches)}: {', '.join([BASELINE, *(a.name for a in others)])}"
        )
        baseline = row_of(all_arms(plan.modules)[0][BASELINE])
        baselines.append(baseline)
        in_batch = {BASELINE: baseline} | {arm.name: rows[arm.name] for arm in others}
        for row in in_batch.values():
            row.batch = number
        with Workshop(plan.method) as workshop:
            _run_batch(workshop, workload, in_batch, reference, plan)
    return {
        "workload": asdict(workload) | {"sizes": workload.sizes(), "numel": workload.numel()},
        "reference": reference,
        "rows": [asdict(row) for row in rows.values() if row.name != BASELINE],
        "baselines": [asdict(row) for row in baselines],
    }


def fitting_at_once(workload: Workload, ranks: int) -> int:
    """How many arms this machine's free memory holds, the baseline included; at least two."""
    available = 4e9
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        available = 1024.0 * int(lines["MemAvailable"].split()[0])
    return max(2, int(0.7 * available / (ranks * (RANK_BYTES + STATES * 4 * workload.numel()))))


def _gate_controls(
    workshop: Workshop, workload: Workload, controls: Sequence[Arm], rows: dict[str, Row], plan: Plan
) -> list[float]:
    """The losses of one process; and what the gate says of arms that are wrong on purpose."""
    crews = [_start(workshop, arm, workload, plan) for arm in (REFERENCE, *controls)]
    reference: list[float] = []
    for crew in crews:
        crew.meet()
        crew.build()
        losses = _losses(crew, plan.gate_steps)
        crew.kill()
        if crew.arm is REFERENCE:
            reference = losses
            continue
        row = rows[crew.arm.name]
        row.losses, row.deviation = losses, deviation(losses, reference)
        row.outcome = "caught" if row.deviation > TOLERANCE else "NOT CAUGHT"
        _say(f"{workload.name}: {row.name}: {row.outcome}, its losses are {row.deviation:.1e} away")
    return reference


def _run_batch(
    workshop: Workshop, workload: Workload, rows: dict[str, Row], reference: Sequence[float], plan: Plan
) -> None:
    """Fill the rows: gate, memory, then rounds of turns. An arm that fails leaves, the others go on."""
    arms = all_arms(plan.modules)[0]
    crews = {name: _start(workshop, arms[name], workload, plan) for name in rows}

    def each(act: Any) -> None:
        for name, crew in list(crews.items()):
            try:
                keep = act(rows[name], crew)
            except ArmFailure as failure:
                rows[name].outcome = "absent" if isinstance(failure, ArmAbsent) else "failed"
                rows[name].reason, keep = str(failure), False
                _say(f"{workload.name}: {name}: {rows[name].outcome}: {failure}")
            if not keep:
                crews.pop(name).kill()

    def meet(row: Row, crew: Crew) -> bool:
        crew.meet()
        return True

    def check(row: Row, crew: Crew) -> bool:
        if _has_memory(crew):
            row.memory_before = [resident_bytes(pid) for pid in crew.pids]
        crew.build()
        row.losses = _losses(crew, plan.gate_steps)
        if row.kind == "floor":
            return True
        row.deviation = deviation(row.losses, reference)
        if row.deviation <= TOLERANCE:
            return True
        row.outcome, row.reason = "wrong loss", f"{row.deviation:.1e} from one process, {TOLERANCE:.0e} allowed"
        _say(f"{workload.name}: {row.name}: WRONG LOSS, {row.reason}")
        return False

    def measure_memory(row: Row, crew: Crew) -> bool:
        if row.memory_before:
            watch = PeakWatch(crew.pids)
            crew.steps(plan.gate_steps, plan.memory_steps, watch.sample)
            row.memory_peak, row.memory_samples = list(watch.peak_bytes.values()), watch.samples
        return True

    each(meet)
    each(check)
    each(measure_memory)
    shuffle = random.Random(SEED)
    for turn in range(plan.rounds):
        order = list(crews)
        shuffle.shuffle(order)
        crews = {name: crews[name] for name in order}
        first = plan.gate_steps + plan.memory_steps + turn * (WARMING_STEPS + plan.steps_per_turn)

        def take_turn(row: Row, crew: Crew, first: int = first) -> bool:
            samples = crew.steps(first, WARMING_STEPS + plan.steps_per_turn)
            row.add([rank[WARMING_STEPS:] for rank in samples])
            return True

        each(take_turn)


def _start(workshop: Workshop, arm: Arm, workload: Workload, plan: Plan) -> Crew:
    ranks = 1 if arm is REFERENCE else plan.ranks
    job = Job(arm.name, plan.modules, workload, ranks, plan.ranks, plan.accumulation)
    return workshop.start(arm, job, plan.limits)


def _losses(crew: Crew, count: int) -> list[float]:
    samples = crew.steps(0, count)
    return mean_over_ranks([[sample.loss for sample in rank] for rank in samples])


def _has_memory(crew: Crew) -> bool:
    return Path(f"/proc/{crew.pids[0]}/smaps_rollup").exists()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def faults(results: Sequence[dict[str, Any]]) -> list[str]:
    """Why the run is not to be trusted: a control that was not caught, a baseline or an arm of ours that failed."""
    found = []
    for result in results:
        for row in [*result["rows"], *result["baselines"]]:
            ours = row["kind"] == "ours" or row["name"] == BASELINE
            if row["outcome"] == "NOT CAUGHT" or (ours and row["outcome"] in ("failed", "wrong loss")):
                found.append(f"{result['workload']['name']}: {row['name']}: {row['outcome']} {row['reason']}".strip())
    return found


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks steps", description=__doc__)
    made.add_argument("--workloads", nargs="+", default=list(TABLE), choices=list(WORKLOADS))
    made.add_argument("--arms", nargs="+", metavar="ARM", help="names of arms, or the beginnings of names; default all")
    made.add_argument("--list", action="store_true", help="list the arms and what is absent, and stop")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--accumulation", type=int, default=1, help="microbatches a step")
    made.add_argument("--rounds", type=int, default=8, help="turns of each arm")
    made.add_argument("--steps-per-turn", type=int, default=3)
    made.add_argument(
        "--at-once", type=int, help="arms alive together, the baseline included; default what memory holds"
    )
    made.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the ratios as steps_WORKLOAD.png there")
    add_json(made)
    return made


def chosen(names: Sequence[str] | None, arms: dict[str, Arm]) -> list[Arm]:
    """The arms that `names` mean; ValueError for a name that means none. Reference and controls always run."""
    timed = {name: arm for name, arm in arms.items() if arm.kind not in ("reference", "control")}
    if names is None:
        return list(timed.values())
    picked: dict[str, Arm] = {}
    for wanted in names:
        found = [wanted] if wanted in timed else [name for name in timed if name.startswith(wanted)]
        if not found:
            raise ValueError(f"no arm's name begins with {wanted!r}; there are {', '.join(timed)}")
        picked |= {name: timed[name] for name in found}
    return list(picked.values())


def main(arguments: list[str]) -> int:
    """Run, print one table a workload; 1 when a control was not caught or an arm of ours failed."""
    options = parser().parse_args(arguments)
    arms, missing = all_arms()
    if options.list:
        for name, arm in arms.items():
            print(f"{name:<28} {arm.why_absent() or arm.about}")
        return 0
    if options.at_once is not None and options.at_once < 2:
        raise ValueError(f"--at-once is {options.at_once}; an arm and the baseline are two")
    plan = Plan(
        ranks=options.ranks,
        accumulation=options.accumulation,
        rounds=options.rounds,
        steps_per_turn=options.steps_per_turn,
        at_once=options.at_once,
    )
    about = circumstances("steps", arguments)
    results = []
    for name in options.workloads:
        results.append(run_workload(WORKLOADS[name], chosen(options.arms, arms), plan))
        print("\n".join(table(results[-1], plan.ranks, plan.accumulation, TOLERANCE, about)) + "\n", flush=True)
        # After each workload, so that what was measured is kept whatever happens to the next one.
        write_json(options.json, "steps", arguments, {"plan": asdict(plan), "workloads": results, "missing": missing})
        if options.plots is not None:
            draw_ratios(options.plots / f"steps_{name}.png", results[-1], about)
    for module, reason in missing.items():
        print(f"absent: {module}: {reason}")
    wrong = faults(results)
    for line in wrong:
        print(f"FAULT: {line}", file=sys.stderr)
    return 1 if wrong else 0

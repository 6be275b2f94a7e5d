"""One start of the arms: processes, gate, memory, rounds of turns. What `steps` calls in a new process each time."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.arms import Arm, all_arms
from benchmarks.arms_torch import REFERENCE
from benchmarks.interleave import ArmAbsent, ArmFailure, Crew, Job, StepSample, Workshop
from benchmarks.process_memory import PeakWatch, resident_bytes
from benchmarks.step_figures import deviation, mean_over_ranks
from benchmarks.step_plan import TOLERANCE, Plan, Turns
from benchmarks.workloads import Workload

SEED = 1
WARMING_STEPS = 1  # not counted at the begin of a turn: the arms before have had the caches, and a processor sleeps


def reference_and_controls(workload: Workload, plan: Plan) -> tuple[list[float], list[Turns]]:
    """The losses of one process; and what the gate says of arms that are wrong on purpose."""
    reference: list[float] = []
    controls = [arm for arm in all_arms(plan.modules)[0].values() if arm.kind == "control"]
    judged = []
    with Workshop() as workshop:
        for crew in [_start(workshop, arm, workload, plan) for arm in (REFERENCE, *controls)]:
            crew.meet()
            crew.build()
            losses = _losses(crew.steps(plan.gate_steps))
            crew.kill()
            if crew.arm is REFERENCE:
                reference = losses
                continue
            turns = Turns(crew.arm.name, 0, 0, losses=losses, deviation=(off := deviation(losses, reference)))
            turns.outcome = "caught" if off > TOLERANCE else "NOT CAUGHT"
            judged.append(turns)
            say(f"{workload.name}: {turns.name}: {turns.outcome}, its losses are {off:.1e} away")
    return reference, judged


def measure_start(
    workload: Workload, batches: Sequence[Sequence[str]], reference: Sequence[float], plan: Plan, start: int
) -> list[Turns]:
    """Start the arms of each batch, in which they are alive together, and measure them; the baseline comes first."""
    found: list[Turns] = []
    for number, names in enumerate(batches):
        say(
            f"{workload.name}: start {start + 1} of {plan.starts}, batch {number + 1} of {len(batches)}: "
            f"{len(names)} arms"
        )
        turns = {name: Turns(name, start, number) for name in names}
        with Workshop() as workshop:
            _Batch(workshop, workload, turns, reference, plan, start).run()
        found += turns.values()
    return found


class _Batch:
    """Arms that are alive together, of which one works at a time. An arm that fails leaves, the others continue."""

    def __init__(
        self,
        workshop: Workshop,
        workload: Workload,
        turns: dict[str, Turns],
        reference: Sequence[float],
        plan: Plan,
        start: int,
    ) -> None:
        arms = all_arms(plan.modules)[0]
        self.workload, self.turns, self.reference, self.plan, self.start = workload, turns, reference, plan, start
        self.begun = time.monotonic()
        self.crews = {name: _start(workshop, arms[name], workload, plan) for name in turns}
        self.step_s: dict[str, float] = {}

    def run(self) -> None:
        """Fill the turns."""
        self._each(self._meet)
        self._report("imported")
        self._each(self._check)
        self._report("built and checked")
        shuffle = random.Random(SEED + self.start)
        for number in range(self.plan.rounds_of(self.workload)):
            order = list(self.crews)
            shuffle.shuffle(order)
            self.crews = {name: self.crews[name] for name in order}
            self._each(self._take_turn)
            self._report(f"round {number + 1}")

    def _each(self, act: Callable[[Turns, Crew], bool]) -> None:
        for name, crew in list(self.crews.items()):
            turns = self.turns[name]
            try:
                keep = act(turns, crew)
            except ArmFailure as failure:
                turns.outcome = "absent" if isinstance(failure, ArmAbsent) else "failed"
                turns.reason, keep = str(failure), False
                say(f"{self.workload.name}: {name}: {turns.outcome}: {failure}")
            if not keep:
                self.crews.pop(name).kill()

    def _meet(self, turns: Turns, crew: Crew) -> bool:
        crew.meet()
        return True

    def _check(self, turns: Turns, crew: Crew) -> bool:
        """The first steps: losses of all of them, memory of the last, when the arm is warm."""
        watched = _has_memory(crew)
        if watched:
            turns.memory_before = [resident_bytes(pid) for pid in crew.pids]
        crew.build()
        gate = self.plan.gate_of(self.start)
        samples = crew.steps(gate - self.plan.memory_steps)
        watch = PeakWatch(crew.pids)
        last = crew.steps(self.plan.memory_steps, watch.sample if watched else None)
        samples = [[*before, *after] for before, after in zip(samples, last, strict=True)]
        if watched:
            turns.memory_peak, turns.memory_samples = list(watch.peak_bytes.values()), watch.samples
        self.step_s[turns.name] = mean_over_ranks([[one.wall_s for one in rank] for rank in samples])[-1]
        turns.losses = _losses(samples)
        if crew.arm.kind == "floor":
            return True
        turns.deviation = deviation(turns.losses, self.reference[:gate])
        if turns.deviation <= TOLERANCE:
            return True
        turns.outcome, turns.reason = "wrong loss", f"{turns.deviation:.1e} from one process, {TOLERANCE:.0e} allowed"
        say(f"{self.workload.name}: {turns.name}: WRONG LOSS, {turns.reason}")
        return False

    def _take_turn(self, turns: Turns, crew: Crew) -> bool:
        samples = crew.steps(WARMING_STEPS + self.plan.counted_steps(self.step_s[turns.name]))
        counted = [rank[WARMING_STEPS:] for rank in samples]
        turns.wall_s.append(mean_over_ranks([[one.wall_s for one in rank] for rank in counted]))
        turns.cpu_s.append(mean_over_ranks([[one.cpu_s for one in rank] for rank in counted]))
        return True

    def _report(self, what: str) -> None:
        say(f"{self.workload.name}:   {what} after {time.monotonic() - self.begun:.0f} s")


def _start(workshop: Workshop, arm: Arm, workload: Workload, plan: Plan) -> Crew:
    ranks = 1 if arm is REFERENCE else plan.ranks
    job = Job(arm.name, plan.modules, workload, ranks, plan.ranks, plan.accumulation)
    return workshop.start(arm, job, plan.limits)


def _losses(samples: Sequence[Sequence[StepSample]]) -> list[float]:
    return mean_over_ranks([[sample.loss for sample in rank] for rank in samples])


def _has_memory(crew: Crew) -> bool:
    return Path(f"/proc/{crew.pids[0]}/smaps_rollup").exists()


def say(line: str) -> None:
    """Print progress to stderr; the table is on standard output."""
    print(line, file=sys.stderr, flush=True)

"""The time, processor time and memory of a training step: torch's wrappers, other frameworks and ours, in one run.

Every arm has rank processes of its own and works while all others wait; turns go round in a shuffled order. All
processes are started again `--starts` times, as an arm takes more or less by how the memory of its processes came to
lie: every figure is a median over starts, its spread the least and the most of a start. Where not all arms fit into
memory at once they run in batches, the baseline (torch DDP at its defaults) in each; ratios are to the baseline of the
same start and batch. An arm's figures count only if the losses of its first steps are those of one process on the same
global batch; arms that are wrong on purpose show that this would be noticed, and if one is not the exit status is 1.
See benchmarks/arms.py for what an arm is and benchmarks/workloads.py for what they train. Expect 40 minutes on two
cores with all peers installed; each table says what it took.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, all_arms
from benchmarks.arms_torch import BASELINE
from benchmarks.new_process import in_new_process
from benchmarks.report import add_json, circumstances, write_json
from benchmarks.step_plan import Plan, arm_bytes, batches_of, free_bytes, row_of
from benchmarks.step_start import measure_start, reference_and_controls, say
from benchmarks.step_summary import aims_of, as_values, summary
from benchmarks.step_table import STAGES, draw_ratios, table
from benchmarks.workloads import TABLE, WORKLOADS, Workload


def run_workload(
    workload: Workload, arms: Sequence[Arm], plan: Plan, call: Callable[..., Any] = in_new_process
) -> dict[str, Any]:
    """Measure `arms`, the baseline and the floors on a workload; their rows, and the losses of the reference.

    call: calls what measures a start; the memory of a new process lies in a new way.
    """
    known = all_arms(plan.modules)[0]
    baseline = row_of(known[BASELINE])
    rows = {name: row_of(arm) for name, arm in known.items() if arm in arms or arm.kind in ("floor", "control")}
    rows.pop(BASELINE, None)
    for row in rows.values():
        if reason := known[row.name].why_absent():
            row.outcome, row.reason = "absent", reason
    workload_begun = time.monotonic()
    limit = plan.memory_bytes or free_bytes()
    numel, sizes = workload.numel(), workload.sizes()
    say(f"{workload.name}: {sizes}")
    reference, judged = reference_and_controls(workload, plan)
    for turns in judged:
        rows[turns.name].add(turns)
    names: list[list[list[str]]] = []
    for start in range(plan.starts):
        wanted = [known[row.name] for row in rows.values() if row.outcome == "measured"]
        wanted.sort(key=lambda arm: STAGES.index(arm.stage))
        batches = batches_of(wanted, known[BASELINE], workload, plan.ranks, limit)
        names.append([[arm.name for arm in batch] for batch in batches])
        needed = (sum(arm_bytes(arm, numel, plan.ranks) for arm in batch) / 2**30 for batch in batches)
        say(f"{workload.name}: batches of {', '.join(f'{gib:.1f}' for gib in needed)} of {limit / 2**30:.1f} GiB")
        begun = time.monotonic()
        for turns in call(measure_start, workload, names[-1], reference, plan, start):
            (baseline if turns.name == BASELINE else rows[turns.name]).add(turns)
        took = time.monotonic() - begun
        left = plan.starts - 1 - start
        say(f"{workload.name}: start {start + 1} took {took:.0f} s; {left} to come, about {left * took / 60:.0f} min")
    return {
        "workload": asdict(workload) | {"sizes": sizes, "numel": numel, "passing": workload.passing_numel(plan.ranks)},
        "plan": asdict(plan),
        "rounds": plan.rounds_of(workload),
        "batches": names[0],
        "reference": reference,
        "took_s": time.monotonic() - workload_begun,
        "rows": [asdict(row) for row in rows.values()],
        "baseline": asdict(baseline),
    }


def faults(results: Sequence[dict[str, Any]]) -> list[str]:
    """Reasons not to trust the run: a control that was not caught, a baseline or an arm of ours that failed."""
    found = []
    for result in results:
        for row in [*result["rows"], result["baseline"]]:
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
    made.add_argument("--ranks", type=_positive, default=Plan.ranks)
    made.add_argument("--accumulation", type=_positive, default=Plan.accumulation, help="microbatches a step")
    made.add_argument("--starts", type=_positive, default=Plan.starts, help="of the processes of every arm")
    made.add_argument("--rounds", type=_positive, help="turns of each arm in a start; default: as the workload says")
    made.add_argument(
        "--steps-per-turn",
        type=_positive,
        default=Plan.steps_per_turn,
        help=f"that are counted; fewer, at least one, of an arm that would take more than {Plan.turn_s:g} s for them",
    )
    made.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="for the arms that are alive together, as estimated; default most of what the machine has left",
    )
    made.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the ratios as steps_WORKLOAD.png there")
    add_json(made)
    return made


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}, and it has to be at least 1")
    return number


def chosen(names: Sequence[str] | None, arms: dict[str, Arm]) -> list[Arm]:
    """The arms that `names` mean; ValueError for a name that means none. Reference, controls and floors always run."""
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
    """Run, print one table a workload and what they say together; 1 when a control or an arm of ours went wrong."""
    options = parser().parse_args(arguments)
    arms, missing = all_arms()
    if options.list:
        for name, arm in arms.items():
            print(f"{name:<31} {arm.why_absent() or arm.about}")
        return 0
    plan = Plan(
        ranks=options.ranks,
        accumulation=options.accumulation,
        starts=options.starts,
        rounds=options.rounds,
        steps_per_turn=options.steps_per_turn,
        memory_bytes=None if options.memory is None else options.memory * 2**30,
    )
    os.environ["OMP_NUM_THREADS"] = "1"  # of all processes that are started from here
    about = circumstances("steps", arguments)
    results = []
    for name in options.workloads:
        results.append(run_workload(WORKLOADS[name], chosen(options.arms, arms), plan))
        print("\n".join(table(results[-1], about)) + "\n", flush=True)
        # After each workload, so that what was measured is kept if the next one fails.
        values = {"workloads": results, "summary": as_values(results), "missing": missing}
        write_json(options.json, "steps", arguments, values)
        if options.plots is not None:
            draw_ratios(options.plots / f"steps_{name}.png", results[-1], about)
    if len(results) > 1:
        print("\n".join(summary(results)) + "\n")
    for aim in (aim for result in results for aim in aims_of(result)):
        print(aim.line())
    for module, reason in missing.items():
        print(f"absent: {module}: {reason}")
    wrong = faults(results)
    for line in wrong:
        print(f"FAULT: {line}", file=sys.stderr)
    return 1 if wrong else 0

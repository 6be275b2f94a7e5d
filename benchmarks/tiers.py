"""Cost of files instead of RAM: a step with sharded parameters, with all of it in RAM and with more and more in files.

The arms train as those of `python -m benchmarks steps` do (benchmarks/arms.py), each in rank processes of its own, one
at a time, in shuffled turns. An arm counts only if its losses of the first steps are those of one process, and if they
have the bits of the arm in RAM. A ratio is that of a round: an arm's median step over that of the arm in RAM, which ran
seconds apart. Files lie in the temporary directory (TMPDIR names another one). They cost most where the kernel has no
RAM left for their pages; here it keeps as many as it can, and writes them back during the step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks import arms_core
from benchmarks.arms import Arm, Step
from benchmarks.new_process import in_new_process
from benchmarks.report import add_json, circumstances, write_json
from benchmarks.step_figures import flat, ratio_of_medians
from benchmarks.step_plan import Plan, Turns
from benchmarks.step_start import measure_start, reference_and_controls
from benchmarks.workloads import WORKLOADS, Workload

IN_RAM = "nothing"
CLOCKS = ("wall_s", "cpu_s")
MODULES = ("benchmarks.arms_torch", "benchmarks.tiers")
FRACTIONS: dict[str, dict[str, Any]] = {  # what lies in files -> core.distributed.Placement
    IN_RAM: {},
    "moments": {"offload_optim_frac": 1.0},
    "moments, parameters": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0},
    "moments, parameters, gradients": {
        "offload_optim_frac": 1.0,
        "offload_param_frac": 1.0,
        "offload_grad_frac": 1.0,
    },
    "half of each": {"offload_optim_frac": 0.5, "offload_param_frac": 0.5, "offload_grad_frac": 0.5},
}


def _build(workload: Workload, ranks: int, accumulation: int, **fractions: Any) -> Step:
    from core.distributed import Placement

    placement = Placement(**fractions, directory=tempfile.gettempdir()) if fractions else None
    options: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads_params", "placement": placement}
    return arms_core.build(workload, ranks, accumulation, **options)


ARMS = tuple(
    Arm(name, f"in files: {name}", "optim_grads_params", partial(_build, **fractions), "ours", arms_core.IMPORTS)
    for name, fractions in FRACTIONS.items()
)


def measure(workload: Workload, plan: Plan) -> list[Turns]:
    """The turns of every arm in every start; RuntimeError where an arm, or a control, is not as it must be."""
    reference, controls = reference_and_controls(workload, plan)
    found = list(controls)
    for start in range(plan.starts):
        found += in_new_process(measure_start, workload, [list(FRACTIONS)], reference, plan, start)
    refuse_wrong(found)
    return [turns for turns in found if turns.name in FRACTIONS]


def refuse_wrong(found: Sequence[Turns]) -> None:
    """RuntimeError that names an arm that failed or has other losses than the one in RAM, or an uncaught control."""
    in_ram = {turns.start: turns.losses for turns in found if turns.name == IN_RAM}
    for turns in found:
        if turns.outcome not in ("measured", "caught"):
            raise RuntimeError(f"in files: {turns.name}: {turns.outcome} {turns.reason}".strip())
        if turns.name in FRACTIONS and turns.losses != in_ram[turns.start]:
            raise RuntimeError(f"in files: {turns.name}: losses {turns.losses}, in RAM {in_ram[turns.start]}")


def rows_of(found: Sequence[Turns]) -> list[dict[str, Any]]:
    """A row an arm: medians over all steps, ratios by round, and the mean over ranks of what memory has grown by."""
    in_ram = {turns.start: turns for turns in found if turns.name == IN_RAM}
    rows = []
    for name in FRACTIONS:
        mine = [turns for turns in found if turns.name == name]
        row: dict[str, Any] = {"in_files": name}
        for clock in CLOCKS:
            rounds = [(getattr(turns, clock), getattr(in_ram[turns.start], clock)) for turns in mine]
            ratios = [
                ratio_of_medians([steps], [plain])
                for arm, reference in rounds
                for steps, plain in zip(arm, reference, strict=True)
            ]
            median = statistics.median(step for arm, _ in rounds for step in flat(arm))
            row[clock] = {"median": median, "ratio": statistics.median(ratios), "range": (min(ratios), max(ratios))}
        grown = [
            peak - before for turns in mine for peak, before in zip(turns.memory_peak, turns.memory_before, strict=True)
        ]
        rows.append(row | {"memory_bytes": statistics.fmean(grown) if grown else None})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows in Markdown."""
    lines = [
        "| in files | step | over RAM | least, most | processor time | over RAM | least, most | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["in_files"]]
        for clock in CLOCKS:
            low, high = row[clock]["range"]
            cells += [f"{1e3 * row[clock]['median']:.0f} ms", f"{row[clock]['ratio']:.2f}", f"{low:.2f}, {high:.2f}"]
        cells.append("-" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e6:.0f} MB")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: list[str]) -> None:
    """Print a table for each workload."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", default=["gpt10m", "gpt51m"], choices=list(WORKLOADS))
    parser.add_argument("--ranks", type=int, default=Plan.ranks)
    parser.add_argument("--starts", type=int, default=2, help="of the processes of every arm")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each arm in a start")
    add_json(parser)
    options = parser.parse_args(arguments)
    for name in ("ranks", "starts", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected at least 1")
    os.environ["OMP_NUM_THREADS"] = "1"  # of all processes that are started from here
    plan = Plan(ranks=options.ranks, starts=options.starts, rounds=options.rounds, modules=MODULES)
    about = circumstances("tiers", arguments)
    results: dict[str, Any] = {}
    for name in options.workloads:
        found = measure(WORKLOADS[name], plan)
        results[name] = {"rows": rows_of(found), "turns": [asdict(turns) for turns in found]}
        print(f"{name}: {WORKLOADS[name].sizes()}")
        print(f"{plan.ranks} ranks, gloo, 1 thread each; torch {about['torch']}, {about['machine']}, {about['date']}")
        print("\n".join(table(results[name]["rows"])), flush=True)
    print("memory: of a rank, what its peak is above what it had before; pages of files are the kernel's.")
    write_json(options.json, "tiers", arguments, results)

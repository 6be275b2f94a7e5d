"""Plans held against runs (plans.md): memory of every rank, and the time of a step, on 1 to 8 ranks of this machine.

The ranks of one number start together. They measure the device as `python -m core plan calibrate` does, then run some
layouts, then measure the device again. A row's planned time is the mean by the device files before and after it, so a
machine that changes its speed on the way changes both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.host_device import host_figures
from benchmarks.new_process import die_with_parent
from benchmarks.plan_jobs import GptJob, ModelJob, PlannedJob, peak_of
from benchmarks.plan_rows import FULL, ROWS, TINY, PlanRow, Size
from benchmarks.report import add_json, write_json
from core import parallel_state
from core.distributed import finalize_model_grads
from core_plan.calibrate import Clock, measure
from core_plan.device import read_device
from core_plan.model_run import ModelRun
from core_plan.run_memory import RankMemory, parts_of_stages, plan_memory
from core_plan.run_plan import RunPlan
from core_plan.state_bytes import GRADIENTS, MASTERS, MOMENTS, PARAMETERS, POOL
from core_plan.step_memory import RECEIVED

STATE = (PARAMETERS, GRADIENTS, POOL, MASTERS, MOMENTS)
BETWEEN = 2  # rows from one calibration to the next
MEMORY_WITHIN, TIME_WITHIN = 0.05, 0.15
PARTS = ("clear", "compute", "finalize", "optimizer")
COMMAND = "python -m core plan calibrate"


# -- on the ranks ---------------------------------------------------------------------------------------------------


def worker(rank: int, world: int, folder: str, rows: Sequence[PlanRow], size: Size, seconds: float) -> None:
    """One rank: all rows of its number of ranks, and device files between them; each rank leaves what it held."""
    die_with_parent()
    torch.set_num_threads(1)
    directory = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}.store", rank=rank, world_size=world)
    clock = Clock(1.0)
    results: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        if number % BETWEEN == 0:
            calibrate(directory, world, number, seconds)
        torch.manual_seed(0)  # dropout of tensor-parallel ranks is to be equal
        results.append(measure_row(row, row.config(size, directory), clock, seconds / 10))
        parallel_state.destroy_model_parallel()
    calibrate(directory, world, len(rows), seconds)
    (directory / f"{world}-{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def calibrate(directory: Path, world: int, number: int, seconds: float) -> None:
    """A device file of all ranks at once, named after the row that it is made before."""
    links = read_device("laptop") if world == 1 else None  # which no row of one rank uses
    table = measure("this machine", seconds, links, command=f"{COMMAND} --ranks {world} --seconds {seconds:g}")
    own = host_figures(Clock(seconds / 60))
    table |= {**own, "links": {**table["links"], **own.get("links", {})}}
    if dist.get_rank() == 0:
        (directory / f"device-{world}-{number}.json").write_text(json.dumps(table))


def measure_row(row: PlanRow, config: Any, clock: Clock, seconds: float) -> dict[str, Any]:
    """Bytes that this rank held, and seconds of a step on the slowest rank. Collective over all ranks."""
    run = row.run(config)
    job: PlannedJob = ModelJob(config, run) if isinstance(config, ModelRun) else GptJob(config, row.ranks)
    job.step()  # what is made once is there
    held = job.held()
    job.clear()
    activations = peak_of(job.compute, job.known(), alone=row.ranks == 1)
    clock.once(job.step)
    count = max(5, min(40, int(seconds / clock.once(job.step))))
    begun = time.process_time()
    steps = [clock.once(job.step) for _ in range(count)]
    processor = (time.process_time() - begun) / count
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    calls = (job.clear, job.compute, lambda: finalize_model_grads(job.chunks), job.optimizer.step)
    for _ in range(3):
        for name, call in zip(PARTS, calls, strict=True):
            parts[name].append(clock.once(call))
    return {
        "state": {kind: held[kind] for kind in STATE},
        "activations": activations,
        "step_s": statistics.median(steps),
        "processor_s": processor,
        "steps": len(steps),
        "least_s": min(steps),
        "most_s": max(steps),
        "parts_s": {name: statistics.median(taken) for name, taken in parts.items()},
    }


# -- in the parent --------------------------------------------------------------------------------------------------


def measured(world: int, rows: Sequence[PlanRow], size: Size, seconds: float, directory: Path) -> list[list[Any]]:
    """[row][rank] of what the ranks of one number have measured."""
    arguments = (world, str(directory), rows, size, seconds)
    mp.start_processes(worker, arguments, nprocs=world, start_method="forkserver")
    of_ranks = [json.loads((directory / f"{world}-{rank}.json").read_text()) for rank in range(world)]
    return [list(row) for row in zip(*of_ranks, strict=True)]


def compared(row: PlanRow, number: int, size: Size, found: Sequence[Any], directory: Path) -> dict[str, Any]:
    """One row of the table: the plan and what the ranks have measured. number: its place among its ranks'."""
    run = row.run(row.config(size, directory))
    parts = parts_of_stages(run)
    memories = plan_memory(run, range(row.ranks), parts)
    begun = number - number % BETWEEN
    files = sorted(directory.glob(f"device-{row.ranks}-*.json"), key=lambda path: int(path.stem.split("-")[-1]))
    after = [int(path.stem.split("-")[-1]) for path in files]
    around = [files[after.index(begun)], files[after.index(begun) + 1]]
    first = [memory for memory in memories if memory.rank in run.first_ranks()]
    times = [RunPlan(run, read_device(str(path)), first, parts).time for path in around]
    activations = [in_step(memory) for memory in memories]
    seen = [rank["activations"] for rank in found]
    if "ep" in row.name:  # the plan gives all experts as many tokens, which holds for the ranks together
        seen = [sum(seen) / len(seen)] * len(seen)
    worst = max(range(row.ranks), key=lambda rank: abs(activations[rank] / seen[rank] - 1))
    states = [sum(memory.state.get(kind, 0) for kind in STATE) for memory in memories]
    kinds = ("compute", "exchanges", "bubble", "slower_ranks", "gradients", "optimizer")
    return {
        "run": row.name,
        "ranks": row.ranks,
        "held_out": row.held_out,
        "states_exact": all(_states(memory) == rank["state"] for memory, rank in zip(memories, found, strict=True)),
        "worst_rank": worst,
        "planned_bytes": states[worst] + activations[worst],
        "measured_bytes": sum(found[worst]["state"].values()) + seen[worst],
        "activations_ratio": activations[worst] / seen[worst],
        "planned_s": statistics.mean(time.seconds for time in times),
        "planned_by_each_s": [time.seconds for time in times],
        "planned_parts_s": {kind: statistics.mean(getattr(time, kind) for time in times) for kind in kinds},
        **{key: found[0][key] for key in ("step_s", "processor_s", "steps", "least_s", "most_s", "parts_s")},
    }


def in_step(memory: RankMemory) -> int:
    """Planned bytes that a step adds at its highest point; not those that a pipeline keeps from step to step."""
    return sum(memory.highest.held.values()) - memory.highest.held[RECEIVED]


def _states(memory: RankMemory) -> dict[str, int]:
    return {kind: memory.state.get(kind, 0) for kind in STATE}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown, and those that miss the aims, by name."""
    lines = [
        "| ranks | run | planned | measured | ratio | activations | planned | measured | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory, time_s = _ratios(row)
        mib = [f"{row[key] / 2**20:.2f} MiB" for key in ("planned_bytes", "measured_bytes")]
        ms = [f"{1e3 * row[key]:.1f} ms" for key in ("planned_s", "step_s")]
        name = f"{row['run']}{' (held out)' if row['held_out'] else ''}"
        cells = [
            str(row["ranks"]),
            name,
            *mib,
            f"{memory:.3f}",
            f"{row['activations_ratio']:.3f}",
            *ms,
            f"{time_s:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *misses(rows)])


def misses(rows: Sequence[dict[str, Any]]) -> list[str]:
    """In words which rows miss an aim."""
    inexact = [row["run"] for row in rows if not row["states_exact"]]
    memory = [row["run"] for row in rows if abs(row["activations_ratio"] - 1) > MEMORY_WITHIN]
    times = [row["run"] for row in rows if abs(_ratios(row)[1] - 1) > TIME_WITHIN]
    return [
        f"states not to the byte: {'; '.join(inexact) or 'none'}",
        f"activations off by more than {MEMORY_WITHIN:.0%}: {'; '.join(memory) or 'none'}",
        f"time off by more than {TIME_WITHIN:.0%}: {'; '.join(times) or 'none'}",
    ]


def _ratios(row: dict[str, Any]) -> tuple[float, float]:
    return row["planned_bytes"] / row["measured_bytes"], row["planned_s"] / row["step_s"]


def main(arguments: list[str]) -> None:
    """Measure, plan and compare the rows that are asked for, and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plan", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, choices=sorted({row.ranks for row in ROWS}), help="these alone")
    parser.add_argument("--rows", nargs="+", help="rows whose name has one of these in it")
    parser.add_argument("--seconds", type=float, default=10.0, help="of one calibration")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it works")
    add_json(parser)
    options = parser.parse_args(arguments)
    size = TINY if options.tiny else FULL
    wanted = [row for row in ROWS if options.rows is None or any(part in row.name for part in options.rows)]
    wanted = [row for row in wanted if options.ranks is None or row.ranks in options.ranks]
    if not wanted:
        parser.error(f"no row is called so; rows: {', '.join(row.name for row in ROWS)}")
    began = time.perf_counter()
    set_forkserver_preload(["benchmarks.plan", "transformers"])
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        if any(row.family for row in wanted):
            size.write_models(directory)
        for world in sorted({row.ranks for row in wanted}):
            rows = [row for row in wanted if row.ranks == world]
            found = measured(world, rows, size, options.seconds, directory)
            results += [compared(row, number, size, found[number], directory) for number, row in enumerate(rows)]
        devices = {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("device-*.json"))}
    print(f"{size}; took {time.perf_counter() - began:.0f} s; torch {torch.__version__}, gloo, one thread a rank")
    print(table(results))
    write_json(options.json, "plan", arguments, {"rows": results, "devices": devices})

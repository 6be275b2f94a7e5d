"""The optimizer's step beside torch's fused AdamW, in bytes that must move over the bandwidth of a copy.

Arms take turns in a shuffled order, each on the same gradients, after all have been found to compute the same weights.
With two ranks both step at once, and so do the copies that they are compared with; a step's time is the slower rank's.
Copy bandwidth is that of `b.copy_(a)` over kept buffers of the same size as the parameters, bytes read and written. A
step can be above it: a copy fetches the memory that it is about to overwrite, and a step has read that anyway.

The last column is the most tensor memory that one more step, untimed, allocated for its time (allocations.py).
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.allocations import temporary_bytes
from benchmarks.optimizer_arms import ARMS, BF16, PRECISIONS, Problem, StepArm, StepArmSpec, check_weights, shapes_of
from benchmarks.report import add_json, machine, write_json
from benchmarks.workloads import TABLE, WORKLOADS

COPY = "copy"
CHECKED_STEPS = 2
# Of the way that weights have gone. Rounding to bf16 is 1/256 of a weight, and the way of a step a tenth.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """(median, first quartile, third quartile); the last two are the median where there is only one time."""
    if len(times) < 2:
        return times[0], times[0], times[0]
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return median, first, third


def share_of_copy(nbytes: float, seconds: float, copy_bytes: float, copy_seconds: float) -> float:
    """Bytes a second, over those of the copy."""
    return (nbytes / seconds) / (copy_bytes / copy_seconds)


def slowest(seconds: float) -> float:
    """The largest of all ranks' times. Collective."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call that all ranks begin together. Collective."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    return slowest(time.perf_counter() - begun)


def check_arms(problem: Problem, arms: dict[str, tuple[StepArmSpec, StepArm]]) -> None:
    """Let every arm make its first steps, and compare with torch's; raises WrongWeights."""
    start = problem.values(0, problem.precision.param)
    wanted: dict[bool, list[torch.Tensor]] = {}
    tolerance = TOLERANCES[problem.precision.param]
    if problem.precision.moment == BF16:
        tolerance *= 2
    for name, (spec, arm) in arms.items():
        for number in range(CHECKED_STEPS):
            arm.prepare(problem.gradients(number))
            arm.step()
        wanted.setdefault(spec.clipped, arm.weights())
        check_weights(name, arm.weights(), wanted[spec.clipped], start, tolerance)


def measure(
    problem: Problem, specs: Sequence[StepArmSpec], rounds: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each step of each arm and of each copy, and temporary bytes of a step, by name. Collective."""
    arms = {spec.name: (spec, spec.make(problem)) for spec in specs}
    check_arms(problem, arms)
    grads = problem.gradients(CHECKED_STEPS)
    source, target = torch.ones(problem.numel), torch.zeros(problem.numel)
    seconds: dict[str, list[float]] = {name: [] for name in (COPY, *arms)}
    order = random.Random(1)  # the same on every rank
    for _ in range(rounds):
        for name in order.sample(sorted(seconds), len(seconds)):
            if name == COPY:
                seconds[name].append(timed(lambda: target.copy_(source)))
                continue
            arm = arms[name][1]
            arm.prepare(grads)
            seconds[name].append(timed(arm.step))
    temporary = {}
    for name, (_, arm) in arms.items():
        arm.prepare(grads)
        temporary[name] = temporary_bytes(arm.step)
    return seconds, temporary


def results_of(
    problem: Problem, specs: Sequence[StepArmSpec], seconds: dict[str, list[float]], temporary: dict[str, int]
) -> list[dict[str, Any]]:
    """A row for the copy and one for each arm: milliseconds, bytes an element, share of the copy's bandwidth."""
    bytes_of = {spec.name: problem.precision.bytes_per_element(clipped=spec.clipped) for spec in specs}
    bytes_of[COPY] = 8
    copy_s = statistics.median(seconds[COPY])
    rows = []
    for name, times in seconds.items():
        median, first, third = quartiles(times)
        rows.append(
            {
                "arm": name,
                "ms": median * 1e3,
                "ms_quartiles": [first * 1e3, third * 1e3],
                "bytes_per_element": bytes_of[name],
                "gb_per_s": bytes_of[name] * problem.numel / median / 1e9,
                "of_copy": share_of_copy(bytes_of[name], median, bytes_of[COPY], copy_s),
                "temporary_bytes": temporary.get(name, 0),
                "ms_all": [t * 1e3 for t in times],
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    lines = ["| | ms (quartiles) | bytes an element | GB/s | of copy | temporary KiB |", "|---|---|---|---|---|---|"]
    for row in rows:
        low, high = row["ms_quartiles"]
        lines.append(
            f"| {row['arm']} | {row['ms']:.2f} ({low:.2f} to {high:.2f}) | {row['bytes_per_element']} | "
            f"{row['gb_per_s']:.1f} | {row['of_copy']:.2f} | {row['temporary_bytes'] / 1024:.0f} |"
        )
    return "\n".join(lines)


def _rank(rank: int, options: argparse.Namespace, ranks: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    from core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    specs = [spec for spec in ARMS if any(part in spec.name for part in options.arms)]
    for workload in options.workloads:
        for name in options.precisions:
            problem = Problem(shapes_of(workload, ranks), PRECISIONS[name])
            seconds, temporary = measure(problem, specs, options.rounds)
            gc.collect()
            if rank == 0:
                results.put(
                    {
                        "workload": workload,
                        "precision": name,
                        "ranks": ranks,
                        "numel": problem.numel,
                        "tensors": len(problem.shapes),
                        "rows": results_of(problem, specs, seconds, temporary),
                    }
                )
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Print a table for each workload, precision and number of ranks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks optimizer", description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(TABLE), choices=sorted(WORKLOADS))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--arms", nargs="+", default=[""], help="parts of the names of arms; all by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    add_json(parser)
    options = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {machine()}, one thread a rank")
    context = mp.get_context("spawn")
    found: list[dict[str, Any]] = []
    for ranks in options.ranks:
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            mp.spawn(_rank, (options, ranks, store, results), nprocs=ranks)
        while not results.empty():
            found.append(results.get())
            each = found[-1]
            print(
                f"\n### {each['workload']}, {each['precision']}, ranks at once: {each['ranks']}\n\n"
                f"{each['numel']:,} elements in {each['tensors']} tensors a rank\n\n{table(each['rows'])}",
                flush=True,
            )
    write_json(options.json, "optimizer", arguments, found)

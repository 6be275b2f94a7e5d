"""The optimizer's step compared with torch's fused AdamW, in bytes that must move over the bandwidth of a copy.

Arms take turns in a shuffled order, each on the same gradients, after all have been found to compute the same weights.
With two ranks both step at once, and so do the copies that they are compared with; a step's time is the slower rank's.
Copy bandwidth is that of `b.copy_(a)` over kept buffers of the same size as the parameters, bytes read and written. A
step can be above it: a copy fetches the memory that it is about to overwrite, and a step has read that anyway.

Shares are given by the clock and by processor time. Where other programs run too, only the second means much.
The last column is the most tensor memory that one more step, untimed, allocated for its time (allocations.py).
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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


@dataclass
class Times:
    """Seconds of each turn of each arm and of the copy, by name: the slowest rank's."""

    wall: dict[str, list[float]]
    processor: dict[str, list[float]]

    @classmethod
    def of(cls, names: Iterable[str]) -> Times:
        """No turn yet."""
        names = list(names)
        return cls({name: [] for name in names}, {name: [] for name in names})

    def add(self, name: str, call: Callable[[], Any]) -> None:
        """Time a call that all ranks begin together. Collective."""
        dist.barrier()
        begun, begun_working = time.perf_counter(), time.process_time()
        call()
        wall, processor = time.perf_counter() - begun, time.process_time() - begun_working
        self.wall[name].append(slowest(wall))
        self.processor[name].append(slowest(processor))


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


def measure(problem: Problem, specs: Sequence[StepArmSpec], rounds: int) -> tuple[Times, dict[str, int]]:
    """The times of steps and copies, and the temporary bytes of a step of each arm by name. Collective."""
    arms = {spec.name: (spec, spec.make(problem)) for spec in specs}
    check_arms(problem, arms)
    grads = problem.gradients(CHECKED_STEPS)
    source, target = torch.ones(problem.numel), torch.zeros(problem.numel)
    times = Times.of((COPY, *arms))
    order = random.Random(1)  # the same on every rank
    for _ in range(rounds):
        for name in order.sample(sorted(times.wall), len(times.wall)):
            if name == COPY:
                times.add(name, lambda: target.copy_(source))
                continue
            arm = arms[name][1]
            arm.prepare(grads)
            times.add(name, arm.step)
    temporary = {}
    for name, (_, arm) in arms.items():
        arm.prepare(grads)
        temporary[name] = temporary_bytes(arm.step)
    return times, temporary


def results_of(
    problem: Problem, specs: Sequence[StepArmSpec], times: Times, temporary: dict[str, int]
) -> list[dict[str, Any]]:
    """A row for the copy and one for each arm: milliseconds, bytes an element, share of the copy's bandwidth."""
    bytes_of = {spec.name: problem.precision.bytes_per_element(clipped=spec.clipped) for spec in specs}
    bytes_of[COPY] = 8
    copy_s, copy_working_s = statistics.median(times.wall[COPY]), statistics.median(times.processor[COPY])
    rows = []
    for name, wall in times.wall.items():
        median, first, third = quartiles(wall)
        working = statistics.median(times.processor[name])
        rows.append(
            {
                "arm": name,
                "ms": median * 1e3,
                "ms_quartiles": [first * 1e3, third * 1e3],
                "bytes_per_element": bytes_of[name],
                "gb_per_s": bytes_of[name] * problem.numel / median / 1e9,
                "of_copy": share_of_copy(bytes_of[name], median, bytes_of[COPY], copy_s),
                "processor_ms": working * 1e3,
                "of_copy_processor": share_of_copy(bytes_of[name], working, bytes_of[COPY], copy_working_s),
                "temporary_bytes": temporary.get(name, 0),
                "ms_all": [t * 1e3 for t in wall],
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    lines = [
        "| | ms (quartiles) | processor ms | bytes an element | of copy | of copy, processor time | temporary KiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["ms_quartiles"]
        lines.append(
            f"| {row['arm']} | {row['ms']:.2f} ({low:.2f} to {high:.2f}) | {row['processor_ms']:.2f} | "
            f"{row['bytes_per_element']} | {row['of_copy']:.2f} | {row['of_copy_processor']:.2f} | "
            f"{row['temporary_bytes'] / 1024:.0f} |"
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
            times, temporary = measure(problem, specs, options.rounds)
            gc.collect()
            if rank == 0:
                results.put(
                    {
                        "workload": workload,
                        "precision": name,
                        "ranks": ranks,
                        "numel": problem.numel,
                        "tensors": len(problem.shapes),
                        "rows": results_of(problem, specs, times, temporary),
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

"""Cost of the watch of the first two steps: milliseconds of step 1, of step 2 and of later ones, with and without.

Also the comparison of all weights that comes every `check_weights_interval` steps, at once and spread over 1,000 of
them. Each turn trains fresh models on all ranks, the arms in alternating order; a figure is the slowest rank's, and of
several turns the median. The rows `difference` are medians of the difference within a turn. It takes about three
minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.report import add_json, write_json
from benchmarks.startup import slowest
from benchmarks.workloads import WORKLOADS, Workload
from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.distributed_data_parallel_config import Strategy
from core.optimizer import OptimizerConfig, get_megatron_optimizer

# name -> (tensor-parallel ranks of 2, strategy). Over tensor parallelism every parameter is a copy here.
LAYOUTS: dict[str, tuple[int, Strategy]] = {
    "dp 2": (1, "no_shard"),
    "tp 2": (2, "no_shard"),
    "ZeRO-3": (1, "optim_grads_params"),
}
ARMS: tuple[Literal["check", "ignore"], ...] = ("check", "ignore")
INTERVAL = 1000


def time_steps(workload: Workload, strategy: Strategy, arm: Literal["check", "ignore"], steps: int) -> dict[str, float]:
    """Seconds on this rank: of the first two steps, of the median of later ones, of one comparison of all weights."""
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, first_steps=arm, check_weights_interval=0
    )
    model = DistributedDataParallel(None, config, workload.model())
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4), [model])
    taken = []
    for step in range(2 + steps):
        ((inputs, targets),) = workload.microbatches(step, parallel_state.get_data_parallel_rank(), 1)
        dist.barrier()
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(inputs, targets).backward()
        finalize_model_grads([model])
        optimizer.step()
        taken.append(time.perf_counter() - begun)
    dist.barrier()
    begun = time.perf_counter()
    model.unequal_weights()
    compared = time.perf_counter() - begun
    return {"step 1": taken[0], "step 2": taken[1], "later": statistics.median(taken[2:]), "compare": compared}


def worker(rank: int, directory: str, names: Sequence[str], steps: int, repeat: int) -> None:
    """One rank of two: rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    rows: list[dict[str, Any]] = []
    for layout, (tp, strategy) in LAYOUTS.items():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        for name in names:
            turns: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
            time_steps(WORKLOADS[name], strategy, "check", 1)  # torch imports some of itself on the first use
            for turn in range(repeat):
                for arm in ARMS if turn % 2 == 0 else reversed(ARMS):
                    turns[arm].append(slowest(time_steps(WORKLOADS[name], strategy, arm, steps)))
            pairs = list(zip(*(turns[arm] for arm in ARMS), strict=True))
            turns["difference"] = [{phase: one[phase] - other[phase] for phase in one} for one, other in pairs]
            for turned, seconds in turns.items():
                medians = {phase: 1e3 * statistics.median(turn[phase] for turn in seconds) for phase in seconds[0]}
                rows.append({"layout": layout, "model": name, "first_steps": turned, **medians})
        parallel_state.destroy_model_parallel()
    if rank == 0:
        torch.save(rows, f"{directory}/rows.pt")
    dist.barrier()
    dist.destroy_process_group()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A table for a page, one line an arm; times in milliseconds."""
    lines = [
        "| layout | model | `first_steps` | step 1 | step 2 | later steps | all weights compared | of that a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        workload = WORKLOADS[row["model"]]
        model = f"GPT, {workload.numel() / 1e6:.1f} M" if workload.heads else f"{workload.tensors()} tiny tensors"
        times = " | ".join(f"{row[phase]:.1f}" for phase in ("step 1", "step 2", "later", "compare"))
        lines.append(
            f"| {row['layout']} | {model} | `{row['first_steps']}` | {times} | {row['compare'] / INTERVAL:.3f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks first_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=["gpt10m", "tiny"])
    parser.add_argument("--steps", type=int, default=8, help="later steps, of which the median is shown")
    parser.add_argument("--repeat", type=int, default=7, help="turns; medians are shown")
    add_json(parser)
    options = parser.parse_args(arguments)
    for name in ("steps", "repeat"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected at least 1")
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(worker, (directory, options.models, options.steps, options.repeat), nprocs=2)
        rows = torch.load(Path(directory) / "rows.pt")
    print(
        f"torch {torch.__version__}, 2 ranks, gloo, milliseconds, median of {options.repeat} turns, slowest rank; "
        f"load of the machine in the last minute {os.getloadavg()[0]:.1f}, of which these ranks are 2"
    )
    print(table(rows))
    print(f"of that a step: all weights are compared every check_weights_interval={INTERVAL} steps")
    write_json(options.json, "first_steps", arguments, rows)

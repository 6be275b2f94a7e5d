"""Seconds from a model to its first step, over the number of parameters: wrap, optimizer, first step; and torch DDP's.

The model is many tiny tensors of 1 to 16 elements, half of them in modules of their own, so what is measured is what
one parameter costs and whether the cost grows with their number. Each turn wraps fresh models on all ranks; a figure is
the slowest rank's, and of several turns the median. torch DDP is left out where it is expected to take longer than
`--torch-limit` seconds, which is said. The groups of a rank in a world of 16 384 come last.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks import groups
from benchmarks.report import add_json, write_json
from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.distributed_data_parallel_config import Strategy
from core.optimizer import OptimizerConfig, get_megatron_optimizer

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
STRATEGIES: tuple[Strategy, ...] = ("no_shard", "optim")
GROUPS_WORLD = 16_384
LARGE = 10_000  # growth is fitted from here on; below, what every wrap costs counts too
Seconds = dict[str, float]


class TinyTensors(nn.Module):
    """`count` parameters of 1 to 16 elements, every other pair of them the weight and bias of a Linear."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on all ranks
        pairs = count // 4
        self.layers = nn.ModuleList(nn.Linear(1 + i % 4, 1 + i // 4 % 4) for i in range(pairs))
        self.loose = nn.ParameterList(nn.Parameter(torch.full((1 + i % 16,), 0.1)) for i in range(count - 2 * pairs))

    def forward(self) -> torch.Tensor:
        """A loss in which every parameter has a gradient."""
        return torch.cat([param.view(-1) for param in self.parameters()]).square().sum()


def time_ours(count: int, strategy: Strategy) -> Seconds:
    """Seconds of each phase on this rank."""
    model = TinyTensors(count)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, data_parallel_sharding_strategy=strategy)
    laps = Laps()
    wrapped = DistributedDataParallel(None, config, model)
    laps.end("wrap")
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [wrapped])
    laps.end("optimizer")
    for name in ("first step", "second step"):
        wrapped.zero_grad_buffer()
        wrapped().backward()
        finalize_model_grads([wrapped])
        optimizer.step()
        laps.end(name)
    return laps.seconds


def time_torch(count: int) -> Seconds:
    """The same with torch DDP and torch's AdamW."""
    model = TinyTensors(count)
    laps = Laps()
    wrapped = TorchDDP(model)
    laps.end("wrap")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    laps.end("optimizer")
    for name in ("first step", "second step"):
        optimizer.zero_grad()
        wrapped().backward()
        optimizer.step()
        laps.end(name)
    return laps.seconds


class Laps:
    """Seconds between calls of `end`, the first one from when all ranks were here."""

    def __init__(self) -> None:
        self.seconds: Seconds = {}
        dist.barrier()
        self.last = time.perf_counter()

    def end(self, name: str) -> None:
        """A phase is over on this rank."""
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now


def worker(rank: int, world: int, directory: str, sizes: Sequence[int], repeat: int, limit_s: float) -> None:
    """One rank: rank 0 writes the slowest rank's seconds to `directory`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel()
    for warm in STRATEGIES:  # torch imports some of itself on the first use
        time_ours(100, warm)
    time_torch(100)
    rows: list[dict[str, Any]] = []
    known: list[tuple[int, float]] = []
    for count in sizes:
        arms: list[tuple[str, Strategy | None]] = [("core", strategy) for strategy in STRATEGIES]
        if expected(known, count) <= limit_s:
            arms.append(("torch DDP", None))
        turns: dict[tuple[str, Strategy | None], list[Seconds]] = {arm: [] for arm in arms}
        for _ in range(repeat):
            for name, strategy in arms:
                mine = time_torch(count) if strategy is None else time_ours(count, strategy)
                turns[name, strategy].append(slowest(mine))
        for (name, strategy), taken in turns.items():
            row = {phase: statistics.median(turn[phase] for turn in taken) for phase in taken[0]}
            spread = max(turn["wrap"] for turn in taken) - min(turn["wrap"] for turn in taken)
            about = {"ranks": world, "parameters": count, "arm": name, "strategy": strategy or ""}
            rows.append({**about, **row, "wrap spread": spread})
            if name == "torch DDP":
                known.append((count, row["wrap"]))
    if rank == 0:
        torch.save(rows, f"{directory}/rows.pt")
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def slowest(mine: Seconds) -> Seconds:
    """Each phase's seconds on the rank that took longest. Collective."""
    times = torch.tensor(list(mine.values()), dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return dict(zip(mine, times.tolist(), strict=True))


def expected(known: Sequence[tuple[int, float]], count: int) -> float:
    """Seconds that `count` parameters should take, from the last measured one, if they grew with the square."""
    if not known:
        return 0.0
    last, seconds = known[-1]
    return seconds * (count / last) ** 2


def growth(points: Sequence[tuple[int, float]]) -> float:
    """The exponent e of seconds ~ parameters ** e that fits best (least squares of logarithms): 1 is linear."""
    logs = [(math.log(count), math.log(seconds)) for count, seconds in points]
    if len(logs) < 2:
        return math.nan
    return statistics.linear_regression([x for x, _ in logs], [y for _, y in logs]).slope


def growths(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the wrap of each arm at each number of ranks, over the sizes from LARGE on."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["parameters"] >= LARGE:
            name = " ".join(part for part in (row["arm"], row["strategy"], f"{row['ranks']} ranks") if part)
            found.setdefault(name, []).append((row["parameters"], row["wrap"]))
    return {name: growth(points) for name, points in found.items() if len(points) > 1}


def table(rows: Sequence[dict[str, Any]], sizes: Sequence[int]) -> str:
    """One line a measured cell, and one for each size that torch DDP was not run at."""
    lines = [
        f"{'ranks':>5} {'parameters':>10}  {'arm':<16} {'wrap s':>8} {'+-':>6} {'us each':>8} {'optimizer s':>11} "
        f"{'first step s':>12} {'second':>8}"
    ]
    for row in rows:
        lines.append(
            f"{row['ranks']:>5} {row['parameters']:>10}  {(row['arm'] + ' ' + row['strategy']).strip():<16} "
            f"{row['wrap']:>8.3f} {row['wrap spread']:>6.3f} {row['wrap'] / row['parameters'] * 1e6:>8.2f} "
            f"{row['optimizer']:>11.3f} {row['first step']:>12.3f} {row['second step']:>8.3f}"
        )
    for ranks in sorted({row["ranks"] for row in rows}):
        run = {row["parameters"] for row in rows if row["arm"] == "torch DDP" and row["ranks"] == ranks}
        left_out = [str(size) for size in sizes if size not in run]
        if left_out:
            lines.append(f"torch DDP at {ranks} ranks: not run at {', '.join(left_out)} parameters (too slow)")
    return "\n".join(lines)


def measure(sizes: Sequence[int], ranks: Sequence[int], repeat: int, limit_s: float) -> list[dict[str, Any]]:
    """The rows of every number of ranks, each in processes of its own."""
    rows: list[dict[str, Any]] = []
    for world in ranks:
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(worker, (world, directory, tuple(sizes), repeat, limit_s), nprocs=world)
            rows += torch.load(Path(directory) / "rows.pt")
    return rows


def measure_groups(world: int, repeat: int) -> dict[str, float]:
    """Seconds of `initialize_model_parallel` for each layout on torch's fake backend, median."""
    return {
        name: statistics.median(groups.measure(groups.create_own, world, layout)[0] for _ in range(repeat))
        for name, layout in groups.LAYOUTS.items()
    }


def main(arguments: list[str]) -> None:
    """Print the table, the growth of each arm, and the groups."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks startup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=3, help="turns; medians are shown, and the range of the wrap")
    parser.add_argument("--torch-limit", type=float, default=20.0, metavar="SECONDS", help="torch DDP's longest wrap")
    parser.add_argument("--groups-world", type=int, default=GROUPS_WORLD)
    add_json(parser)
    options = parser.parse_args(arguments)
    for name in ("parameters", "ranks"):
        if min(getattr(options, name)) < 1:
            parser.error(f"--{name} {min(getattr(options, name))}: expected at least 1")
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: expected at least 1")

    sizes = sorted(set(options.parameters))
    rows = measure(sizes, options.ranks, options.repeat, options.torch_limit)
    print(f"torch {torch.__version__}, gloo, median of {options.repeat} turns, slowest rank; +-: largest less smallest")
    print(table(rows, sizes))
    exponents = growths(rows)
    for name, exponent in exponents.items():
        print(f"growth of the wrap from {LARGE} parameters on, {name}: parameters ** {exponent:.2f}")
    by_layout = measure_groups(options.groups_world, options.repeat)
    print(f"groups of one rank among {options.groups_world} (fake backend), seconds:")
    for name, seconds in by_layout.items():
        print(f"  {name:<22} {seconds:.3f}")
    write_json(
        options.json,
        "startup",
        arguments,
        {"rows": rows, "growth": exponents, "groups_world": options.groups_world, "groups_s": by_layout},
    )

"""Seconds and group creations of one rank's `initialize_model_parallel`, and of creating every group of the world.

torch's fake backend stands for the network, so this measures what a rank does itself: arithmetic, names, registries.
The usual way (every rank creates every group of every kind, which on a real network also makes all ranks wait for each
other) and ours are run in turns in the same process, each on a fresh default group.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.report import add_json, write_json
from core import parallel_state
from core.groups.rank_grid import GRID_KINDS, RankGrid, default_embedding_ranks, default_position_embedding_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp8": {"tp": 8},
    "tp8 pp8": {"tp": 8, "pp": 8},
    "tp4 cp2 pp4": {"tp": 4, "cp": 2, "pp": 4},
    "tp4 pp8 ep8": {"tp": 4, "pp": 8, "ep": 8},
    "tp2 pp8 ep16 etp1 x2": {"tp": 2, "pp": 8, "ep": 16, "expt_tp": 1, "instances": 2},
}


def create_own(grid: RankGrid, instances: int) -> None:
    """Ours: the groups of this rank."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        context_parallel_size=grid.cp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.expt_tp,
        num_distributed_optimizer_instances=instances,
        create_gloo_process_groups=False,  # a fake network has no gloo
    )


def create_all(grid: RankGrid, instances: int) -> None:
    """The usual way: every group of every kind, whether this rank is in it or not, nothing shared."""
    for tokens, expert in GRID_KINDS.values():
        for ranks in grid.groups(tokens, expert):
            dist.new_group(ranks)
    for ranks in grid.groups("pp"):
        dist.new_group(default_embedding_ranks(ranks))
        dist.new_group(default_position_embedding_ranks(ranks))
    if instances > 1:
        for tokens, expert in (GRID_KINDS["dp_cp"], GRID_KINDS["expt_dp"]):
            for ranks in grid.groups(tokens, expert):
                length = len(ranks) // instances
                for first in range(0, len(ranks), length):
                    dist.new_group(ranks[first : first + length])
                for place in range(length):
                    dist.new_group(ranks[place::length])


def measure(create: Callable[[RankGrid, int], None], world: int, layout: dict[str, Any]) -> tuple[float, int, int]:
    """Seconds, new_group calls and groups this rank is in, on a fresh fake world, for the rank in its middle."""
    new_group, calls = dist.new_group, 0

    def counted(*args: Any, **rest: Any) -> Any:
        nonlocal calls
        calls += 1
        return new_group(*args, **rest)

    sizes = {name: size for name, size in layout.items() if name != "instances"}
    dist.init_process_group("fake", store=FakeStore(), rank=world // 2, world_size=world)
    dist.new_group = counted
    try:
        started = time.perf_counter()
        create(RankGrid(world, **sizes), layout.get("instances", 1))
        seconds = time.perf_counter() - started
        held = len(dist.distributed_c10d._world.pg_map) - 1
    finally:
        dist.new_group = new_group
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return seconds, calls, held


def main(arguments: list[str]) -> None:
    """Print one line a layout and world; the file has every turn."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks groups", description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--repeat", type=int, default=3, help="turns; the median is shown")
    parser.add_argument("--all-up-to", type=int, default=1024, help="largest world where every group is created too")
    add_json(parser)
    options = parser.parse_args(arguments)

    print(f"torch {torch.__version__}, fake backend, median of {options.repeat} turns")
    print("ours: the groups of one rank; all: every group of the world, of which that rank is in so many")
    print(f"{'world':>6}  {'layout':<22} {'ours s':>9} {'calls':>6}   {'all s':>9} {'calls':>7} {'in':>4}  ratio")
    rows = []
    for world in options.worlds:
        for name, layout in LAYOUTS.items():
            ways = [create_own, create_all] if world <= options.all_up_to else [create_own]
            turns = [[measure(way, world, layout) for way in ways] for _ in range(options.repeat)]
            seconds = [statistics.median(turn[way][0] for turn in turns) for way in range(len(ways))]
            line = f"{world:>6}  {name:<22} {seconds[0]:>9.4f} {turns[0][0][1]:>6}   "
            if len(ways) == 2:
                _, calls, held = turns[0][1]
                line += f"{seconds[1]:>9.3f} {calls:>7} {held:>4}  {seconds[1] / seconds[0]:>5.0f}"
            else:
                line += f"{'not run':>9}"
            print(line, flush=True)
            for place, way in enumerate(ways):
                for found, calls, held in (turn[place] for turn in turns):
                    rows.append(
                        {"world": world, "layout": name, "way": way.__name__, "s": found, "calls": calls, "in": held}
                    )
    write_json(options.json, "groups", arguments, rows)

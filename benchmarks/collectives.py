"""Ways to reduce-scatter, all-reduce and gather on CPU, compared: why core.distributed takes the one it takes.

Arms alternate within a run, and each is checked once before it is timed. Figures are medians in milliseconds, of the
slowest rank in each repetition, with the quartiles in the JSON.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.report import add_json, machine, write_json
from core.distributed.wire.collectives import Collectives
from core.distributed.wire.shared_memory import HostMemory

Run = Callable[[], None]
MIB = 2**20
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Arms:
    """Tensors of one measured size: `full` [n * ranks] in private memory, `mapped` the same in shared memory."""

    def __init__(self, numel: int, rank: int, world: int) -> None:
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD
        self.rank, self.world = rank, world
        self.part = numel // world
        self.full = torch.zeros(self.part * world)
        self.received = torch.zeros(self.part * world)
        shared = HostMemory.share(self.full.numel(), torch.float32, self.full.device, [self.group])
        self.mapped = None if shared is None else shared.tensor
        self.collectives = Collectives(channels=[] if shared is None else shared.channels)

    @property
    def mine(self) -> slice:
        """This rank's part."""
        return slice(self.rank * self.part, (self.rank + 1) * self.part)

    def kinds(self) -> dict[str, dict[str, tuple[torch.Tensor, Run]]]:
        """kind -> name -> (the tensor that holds the result, the call)."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        parts = self.full.split(self.part)

        def scattered() -> None:
            reduce_scatter_single(self.received[: self.part], self.full)
            self.full[self.mine].copy_(self.received[: self.part])

        def gathered() -> None:
            self.received[: self.part].copy_(self.full[self.mine])
            all_gather_single(self.full, self.received[: self.part])

        def exchange() -> None:
            dist.all_to_all_single(self.received, self.full)
            torch.sum(self.received.view(self.world, -1), 0, out=self.full[self.mine])

        def pairwise() -> None:
            slots = self.received.split(self.part)
            works = [dist.irecv(slots[rank], rank) for rank in others] + [
                dist.isend(parts[rank], rank) for rank in others
            ]
            for work in works:
                assert work is not None
                work.wait()
            for rank in others:
                self.full[self.mine].add_(slots[rank])

        def broadcasts() -> None:
            works = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(parts)]
            for work in works:
                work.wait()

        found: dict[str, dict[str, tuple[torch.Tensor, Run]]] = {
            "reduce-scatter": {
                "gloo reduce_scatter": (self.full, scattered),
                "gloo all_reduce": (self.full, lambda: dist.all_reduce(self.full)),
                "all_to_all and local sum": (self.full, exchange),
                "isend/irecv and local sum": (self.full, pairwise),
                "added in rank order": (
                    self.full,
                    lambda: Collectives().reduce_scatter(self.full, self.group, "benchmark").wait(),
                ),
            },
            "all-reduce": {
                "gloo all_reduce": (self.full, lambda: dist.all_reduce(self.full)),
                "added in rank order": (
                    self.full,
                    lambda: Collectives(ordered=True).all_reduce(self.full, self.group, "benchmark").wait(),
                ),
            },
            "all-gather": {
                "gloo all_gather": (self.full, gathered),
                "concurrent broadcasts": (self.full, broadcasts),
            },
        }
        if self.mapped is not None:
            mapped, collectives, group = self.mapped, self.collectives, self.group
            found["reduce-scatter"]["mapped memory"] = (
                mapped,
                lambda: collectives.reduce_scatter(mapped, group, "benchmark").wait(),
            )
            found["all-reduce"]["mapped memory"] = (
                mapped,
                lambda: collectives.all_reduce(mapped, group, "benchmark").wait(),
            )
            found["all-gather"]["mapped memory"] = (
                mapped,
                lambda: collectives.all_gather(mapped, group, "benchmark").wait(),
            )
        return found

    def check(self, kind: str, name: str, tensor: torch.Tensor, run: Run) -> None:
        """Raise ValueError unless the call leaves what it should."""
        positions = torch.arange(tensor.numel()) % 1000
        tensor.copy_(positions * (self.rank + 1.0))
        expected = positions * (self.world * (self.world + 1) / 2)
        where = self.mine if kind == "reduce-scatter" else slice(None)
        if kind == "all-gather":
            expected = positions * (torch.arange(tensor.numel()) // self.part + 1.0)
        dist.barrier()
        run()
        if not torch.equal(tensor[where], expected[where]):
            raise ValueError(f"rank {self.rank}: {kind} by {name} gives another result than the sum of all ranks")


def measure(numel: int, rank: int, world: int, repeat: int) -> list[dict[str, Any]]:
    """One row an arm: the times of all repetitions, the slowest rank's."""
    arms = Arms(numel, rank, world)
    flat = [(kind, name, *arm) for kind, named in arms.kinds().items() for name, arm in named.items()]
    times: list[list[float]] = [[] for _ in flat]
    for kind, name, tensor, run in flat:
        arms.check(kind, name, tensor, run)
    for _ in range(repeat):
        for taken, (_, _, tensor, run) in zip(times, flat, strict=True):
            tensor.fill_(1.0)
            dist.barrier()
            begun = time.perf_counter()
            run()
            slowest = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            taken.append(float(slowest) * 1e3)
    return [
        {"ranks": world, "mib": numel * 4 / MIB, "kind": kind, "name": name, "ms": taken}
        for taken, (kind, name, _, _) in zip(times, flat, strict=True)
    ]


def _rank(rank: int, world: int, store: str, sizes: Sequence[float], repeat: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for mib in sizes:
        rows = measure(int(mib * MIB / 4), rank, world, repeat)
        if rank == 0:
            results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Kinds and ways down, (ranks, MiB) across; medians in ms."""
    columns = sorted({(row["ranks"], row["mib"]) for row in rows})
    lines = [f"{'ms':<42}" + "".join(f"{f'{ranks} ranks':>12}" for ranks, _ in columns)]
    lines.append(f"{'':<42}" + "".join(f"{f'{mib:g} MiB':>12}" for _, mib in columns))
    for kind, name in dict.fromkeys((row["kind"], row["name"]) for row in rows):
        found = {
            (r["ranks"], r["mib"]): statistics.median(r["ms"]) for r in rows if (r["kind"], r["name"]) == (kind, name)
        }
        lines.append(
            f"{f'{kind}: {name}':<42}" + "".join(f"{found[c]:>12.2f}" if c in found else f"{'':>12}" for c in columns)
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the table of all ways, sizes and numbers of ranks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks collectives", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16, 64], help="sizes of the whole tensor, fp32")
    parser.add_argument("--repeat", type=int, default=15)
    add_json(parser)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    context = mp.get_context("spawn")
    for ranks in options.ranks:
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            mp.spawn(_rank, (ranks, store, options.mib, options.repeat, results), nprocs=ranks)
        while not results.empty():
            rows += results.get()
    print(f"torch {torch.__version__}, gloo, fp32, one thread a rank, {machine()}; medians of {options.repeat}")
    print(table(rows))
    write_json(options.json, "collectives", arguments, rows)

"""Bytes sent and collectives a step, as the core counts them, against the theory of each strategy and axis.

The theory knows sizes of groups and elements of parameters, nothing of buckets' padding or of the backend. Over n ranks
an all-reduce sends 2 (n - 1) / n of a tensor's bytes from each of them, a reduce-scatter or a gather (n - 1) / n.
Figures are sums over all ranks, as a rank's own shard may hold more of a tied or partial parameter than another's.

Where ranks map each other's memory nothing is sent: what is counted is what the algorithm moves. So every case is also
run through gloo's sockets, where the kernel says how many bytes each process has written (/proc/self/io). Control
messages, a few numbers a step, are not counted by the core; the kernel counts them.

Exit status 1 if a count is more than 1 percent from its theory, or the kernel's from the count of a step that sends a
megabyte or more.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.report import add_json, circumstances, write_json
from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.distributed_data_parallel_config import Strategy
from core.model_parallel_config import ModelParallelConfig

NUMEL = 61_440  # of a large parameter: a multiple of 128, 3 and 4, so that the shards of 2, 3 and 4 ranks are even
DENSE = 8  # large parameters
BUCKETS = 4  # that they make, two in each
NORM = 1_536  # elements of a parameter whose gradient sequence parallelism leaves partial
FLOAT = 4  # bytes
TOLERANCE = 0.01
LARGE = 2**20  # bytes from which on control messages are no longer a percent of what the kernel counts


@dataclass(frozen=True)
class Case:
    """One row: a strategy and what the step has besides."""

    name: str
    worlds: tuple[int, ...] = (2, 3, 4)
    strategy: Strategy = "no_shard"
    microbatches: int = 1
    every: bool = False  # reduce every microbatch
    instances: int = 1
    tensor: int = 1  # tensor-parallel ranks, with sequence parallelism
    pipeline: int = 1  # stages, whose first and last share an embedding
    expert: int = 1  # expert-parallel ranks

    @property
    def sharded(self) -> bool:
        """True if the strategy shards the optimizer's state."""
        return self.strategy != "no_shard"


CASES = (
    Case("no_shard"),
    Case("optim", strategy="optim"),
    Case("optim_grads", strategy="optim_grads"),
    Case("no_shard, 3 microbatches", microbatches=3),
    Case("optim_grads, 3 microbatches, the last", strategy="optim_grads", microbatches=3),
    Case("optim_grads, 3 microbatches, every", strategy="optim_grads", microbatches=3, every=True),
    Case("optim, 2 instances", (4,), strategy="optim", instances=2),
    Case("optim_grads, 2 instances", (4,), strategy="optim_grads", instances=2),
    Case("no_shard, tied embedding, pp 2", (2, 4), pipeline=2),
    Case("optim, tied embedding, pp 2", (4,), strategy="optim", pipeline=2),
    Case("no_shard, sequence parallel, tp 2", (2, 4), tensor=2),
    Case("optim, sequence parallel, tp 2", (4,), strategy="optim", tensor=2),
    Case("no_shard, experts, ep 2", (2, 4), expert=2),
    Case("optim, experts, ep 2", (4,), strategy="optim", expert=2),
)


@dataclass(frozen=True)
class Count:
    """Of one step, over all ranks: bytes sent, and collectives that a rank took part in."""

    nbytes: float
    collectives: float


def all_reduce_bytes(ranks: int, nbytes: float) -> float:
    """Bytes that `ranks` ranks together send for an all-reduce of `nbytes` on each."""
    return ranks * (2 * (ranks - 1) / ranks) * nbytes


def scatter_bytes(ranks: int, nbytes: float) -> float:
    """The same for a reduce-scatter, or a gather of `nbytes` in all."""
    return ranks * ((ranks - 1) / ranks) * nbytes


def theory(case: Case, world: int) -> Count:
    """Bytes that a step must send."""
    data = world // (case.tensor * case.pipeline)
    dense = DENSE * NUMEL * FLOAT
    if case.pipeline > 1:
        dense += NUMEL * FLOAT  # the stage's copy of the embedding
    if case.tensor > 1:
        dense += NORM * FLOAT
    nbytes = _of_buffer(case, world, data, dense)
    if case.expert > 1:
        nbytes += _of_buffer(case, world, world // case.expert, DENSE * NUMEL * FLOAT)
    copies = 1 if case.sharded else data  # of each gradient, over the ranks of a data group
    if case.pipeline > 1:  # stages of one place form the group; there are `tensor` x data places
        nbytes += copies * all_reduce_bytes(2, NUMEL * FLOAT)
    if case.tensor > 1:
        nbytes += copies * case.pipeline * all_reduce_bytes(case.tensor, NORM * FLOAT)
    return Count(nbytes, _collectives(case, world, data))


def _of_buffer(case: Case, world: int, data: int, nbytes: int) -> float:
    """Reductions and gathers of one buffer that each of `world` ranks has, over data groups of `data` ranks."""
    groups = world // data
    if not case.sharded:
        return groups * all_reduce_bytes(data, nbytes)
    shards = data // case.instances
    inside = groups * case.instances * scatter_bytes(shards, nbytes) * (case.microbatches if case.every else 1)
    across = groups * shards * all_reduce_bytes(case.instances, nbytes / shards)
    gathers = groups * case.instances * scatter_bytes(shards, nbytes)
    return inside + across + gathers


def _collectives(case: Case, world: int, data: int) -> float:
    """A rank's, on average over the ranks."""
    rounds = case.microbatches if case.every else 1
    shards, gathers = data // case.instances, 1 if case.sharded else 0
    a_bucket = (rounds + gathers if shards > 1 else 0) + (1 if case.instances > 1 else 0)
    total = buckets_of(case) * a_bucket
    if case.expert > 1 and world // case.expert > 1:
        total += BUCKETS * (rounds + gathers)
    if case.pipeline > 1:
        total += 1  # the embedding; where it is sharded, each data rank's part of it
    if case.tensor > 1:
        total += 1 / data if case.sharded else 1  # the norm lies in one data rank's shard
    return total


def buckets_of(case: Case) -> float:
    """Buckets of the dense parameters, on average over the stages of a pipeline."""
    if case.pipeline == 1:
        return BUCKETS  # the norm fills up the first one
    # The embedding opens one more, and where it is sharded it has one to itself. Later stages have one for the rest.
    return ((BUCKETS + 1) + (2 if case.sharded else 1)) / 2


class Parameters(nn.Module):
    """As many parameters as the case has, each of them used."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        names = [f"dense{index}" for index in range(DENSE)]
        self.all = nn.ParameterDict({name: nn.Parameter(torch.ones(NUMEL)) for name in names})
        if case.expert > 1:
            for index in range(DENSE):
                self.all[f"expert{index}"] = expert = nn.Parameter(torch.ones(NUMEL))
                expert.allreduce = False
        if case.pipeline > 1:
            self.all["embedding"] = embedding = nn.Parameter(torch.ones(NUMEL))
            embedding.shared_embedding = True
        if case.tensor > 1:
            self.all["norm"] = norm = nn.Parameter(torch.ones(NORM))
            norm.sequence_parallel = True
            for name in names:
                self.all[name].sequence_parallel = False

    def forward(self, x: float) -> torch.Tensor:
        """A number."""
        return torch.stack([param.sum() for param in self.all.values()]).sum() * x


def written_bytes() -> int | None:
    """Bytes that this process has asked the kernel to write, sockets included; None where there is no /proc."""
    path = Path("/proc/self/io")
    if not path.exists():
        return None
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("wchar"))


def measure(case: Case, *, share_host_memory: bool) -> tuple[Count, float | None]:
    """Return the core's and the kernel's count of the fourth step, the first unwatched one. Collective."""
    config = ModelParallelConfig(
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        expert_model_parallel_size=case.expert,
        sequence_parallel=case.tensor > 1,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        expert_model_parallel_size=case.expert,
        num_distributed_optimizer_instances=case.instances,
    )
    ddp_config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=case.strategy,
        overlap_grad_reduce=True,
        bucket_size=DENSE // BUCKETS * NUMEL,
        num_distributed_optimizer_instances=case.instances,
        reduce_microbatches="every" if case.every else "last",
        share_host_memory=share_host_memory,
    )
    ddp = DistributedDataParallel(config, ddp_config, Parameters(case))
    gathers = ddp.param_sync.collectives.traffic
    for _ in range(4):
        dist.barrier()
        ddp.param_sync.collectives.begin_step()
        before = written_bytes()
        ddp.zero_grad_buffer()
        for last in [False] * (case.microbatches - 1) + [True]:
            if last:
                ddp(1.0).backward()
            else:
                with ddp.no_sync():
                    ddp(1.0).backward()
        finalize_model_grads([ddp])
        ddp.start_param_sync(force_sync=True)
        after = written_bytes()
    wrote = None if before is None or after is None else after - before
    report = ddp.step_report()
    mine = [
        report.bytes_sent + gathers.bytes_sent,
        report.collectives + gathers.collectives,
        wrote or 0,
    ]
    total = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(total)
    parallel_state.destroy_model_parallel()
    nbytes, collectives, written = total.tolist()
    return Count(nbytes, collectives / dist.get_world_size()), None if wrote is None else written


def off_by(found: float, expected: float) -> float:
    """Relative difference; infinite where nothing was expected and something found."""
    if expected == 0:
        return 0.0 if found == 0 else float("inf")
    return found / expected - 1.0


def judge(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Name in words what is more than the tolerance from its theory."""
    wrong = []
    for row in rows:
        for way in ("memory", "sockets"):
            for what in ("nbytes", "collectives"):
                found, expected = row[way][what], row[f"{way} theory"][what]
                if abs(off_by(found, expected)) > TOLERANCE:
                    wrong.append(
                        f"{row['case']}, {row['ranks']} ranks, {way}: {what} counted {found:g}, theory {expected:g}"
                    )
        written, counted = row["sockets"]["written"], row["sockets"]["nbytes"]
        if written is not None and counted >= LARGE and abs(off_by(written, counted)) > TOLERANCE:
            wrong.append(
                f"{row['case']}, {row['ranks']} ranks: counted {counted:g} bytes, the kernel wrote {written:g}"
            )
    return wrong


def _rank(rank: int, world: int, store: str, names: list[str], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for case in CASES:
        if case.name not in names or world not in case.worlds:
            continue
        row: dict[str, Any] = {"case": case.name, "ranks": world}
        expected = theory(case, world)
        for way in ("memory", "sockets"):
            count, written = measure(case, share_host_memory=way == "memory")
            row[way] = {"nbytes": count.nbytes, "collectives": count.collectives, "written": written}
            row[f"{way} theory"] = {"nbytes": expected.nbytes, "collectives": expected.collectives}
        if rank == 0:
            results.put(row)
    dist.destroy_process_group()


def line_of(row: dict[str, Any]) -> str:
    """One row of the table."""
    text = f"{row['case']:<40}{row['ranks']:>3}"
    for way in ("memory", "sockets"):
        count, expected = row[way], row[f"{way} theory"]
        text += f"{count['nbytes'] / 2**20:>10.3f}{off_by(count['nbytes'], expected['nbytes']):>+9.3%}"
        text += f"{count['collectives']:>6.4g} /{expected['collectives']:>5.4g}"
    written = row["sockets"]["written"]
    return text + ("         -" if written is None else f"{off_by(written, row['sockets']['nbytes']):>+10.2%}")


def main(arguments: list[str]) -> int:
    """Print the table; 1 if a count is more than 1 percent from its theory."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks communication", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument(
        "--cases", nargs="+", choices=[case.name for case in CASES], metavar="CASE", help="by default all"
    )
    add_json(parser)
    options = parser.parse_args(arguments)
    names = options.cases or [case.name for case in CASES]

    around = circumstances("communication", arguments)
    print(f"{around['date'][:10]}, {around['machine']}, torch {around['torch']}, gloo")
    print("MiB a step over all ranks, its distance from theory, collectives a rank counted / theory;")
    print("the last column: what the kernel says the processes wrote, from what the core counted on sockets")
    print(f"{'':<40}{'n':>3}{'memory':>10}{'':>9}{'calls':>13}{'sockets':>10}{'':>9}{'calls':>13}{'kernel':>10}")
    rows: list[dict[str, Any]] = []
    context = mp.get_context("spawn")
    for world in options.ranks:
        if not any(case.name in names and world in case.worlds for case in CASES):
            continue  # ranks without a case would end while others still connect to them
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (world, str(Path(folder) / "store"), names, results), nprocs=world)
        while not results.empty():
            rows.append(results.get())
            print(line_of(rows[-1]), flush=True)
    wrong = judge(rows)
    print("\n".join(wrong) if wrong else f"all {len(rows)} cases within {TOLERANCE:.0%} of theory")
    write_json(options.json, "communication", arguments, rows)
    return 1 if wrong or not rows else 0

"""Bytes a parameter that a rank holds for parameters, gradients and optimizer, by strategy and precision.

Each row is a model that was wrapped and stepped twice on that many gloo processes. What they hold is found by asking
the garbage collector for every tensor that was not there before, so a forgotten copy is counted too; the formula is
benchmarks.memory_formula.bytes_per_parameter. Scratch, which does not grow with the model, is subtracted and
shown apart.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.memory_formula import bytes_per_parameter
from benchmarks.report import add_json, write_json
from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.distributed_data_parallel_config import Strategy
from core.optimizer import OptimizerConfig, get_megatron_optimizer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Precision:
    """One row of the table: dtypes of parameters and gradients, and the optimizer's options."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    options: dict[str, Any]

    def config(self) -> OptimizerConfig:
        """The optimizer's configuration."""
        return OptimizerConfig(
            lr=1e-3,
            bf16=self.param_dtype == BF16,
            fp16=self.param_dtype == FP16,
            initial_loss_scale=1.0,  # a step that overflows would leave no moments to measure
            **self.options,
        )


def _aware(grad_dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    return {"use_precision_aware_optimizer": True, "main_grads_dtype": grad_dtype, **options}


HALVES = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(FP32, FP32, {}),
    "fp16, fp32 masters": Precision(FP16, FP16, {}),
    "bf16, fp32 gradients and masters": Precision(BF16, FP32, {}),
    "bf16, bf16 gradients, fp32 masters": Precision(BF16, BF16, {}),
    "the same with remainders": Precision(BF16, BF16, _aware(BF16)),
    "the same, bf16 moments": Precision(BF16, BF16, _aware(BF16, **HALVES)),
    "bf16 throughout, no masters": Precision(BF16, BF16, _aware(BF16, main_params_dtype=BF16, **HALVES)),
}
STRATEGIES: tuple[Strategy, ...] = ("no_shard", "optim", "optim_grads")


def storages() -> dict[int, torch.UntypedStorage]:
    """All memory that a Python tensor refers to, by address; the dictionary keeps it, so no address comes twice."""
    found: dict[int, torch.UntypedStorage] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage
    return found


def mapped_from_peers(ddp: DistributedDataParallel) -> set[int]:
    """Addresses of the memory that other ranks of this host hold and this one reads: it is counted where it is held."""
    channels = [c for buffer in (*ddp.grad_buffers, *ddp.expert_parallel_buffers) for c in buffer.channels]
    return {
        member.tensor.untyped_storage().data_ptr()
        for channel in channels
        for rank, member in enumerate(channel.members)
        if rank != channel.rank
    }


def measure(precision: Precision, strategy: Strategy, numel: int) -> tuple[float, int]:
    """(bytes a parameter that this rank holds after two steps, bytes of scratch among them, not counted)."""
    gc.collect()
    before = storages()
    width = int((numel // 8) ** 0.5)
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8))).to(precision.param_dtype)
    ddp_config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy,
        grad_reduce_in_fp32=precision.grad_dtype == FP32,
        overlap_grad_reduce=True,
        num_buckets=8,
        initial_weights="broadcast",
    )
    ddp = DistributedDataParallel(None, ddp_config, model)
    optimizer = get_megatron_optimizer(precision.config(), [ddp])
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.full((1, width), 0.01, dtype=precision.param_dtype)
        optimizer.scale_loss(ddp(x).float().sum() * 1e-4).backward()
        finalize_model_grads([ddp])
        if not optimizer.step()[0]:
            raise RuntimeError("the step was skipped, and would have left memory out")
        del x
    gc.collect()
    left_out = before.keys() | mapped_from_peers(ddp)
    held = sum(storage.nbytes() for address, storage in storages().items() if address not in left_out)
    params = sum(param.numel() for param in model.parameters())
    return (held - optimizer.scratch.nbytes) / params, optimizer.scratch.nbytes


def formula(precision: Precision, strategy: Strategy, ranks: int) -> float:
    """The docs' formula for the same row, with the two buckets of eight that 'optim_grads' passes through."""
    row = bytes_per_parameter(
        precision.config(),
        param_dtype=precision.param_dtype,
        grad_dtype=precision.grad_dtype,
        strategy=strategy,
        shard_ranks=ranks,
    )
    return row.total + (precision.grad_dtype.itemsize * 2 / 8 if strategy == "optim_grads" else 0)


def _rank(rank: int, ranks: int, store: str, numel: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel()
    for name, precision in PRECISIONS.items():
        for strategy in STRATEGIES:
            mine, scratch = measure(precision, strategy, numel)
            total = torch.tensor([mine])
            dist.all_reduce(total)
            if rank == 0:
                results.put((ranks, name, strategy, total.item() / ranks, scratch))
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Print the table: for each precision and strategy formula / measured bytes a parameter."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--numel", type=int, default=8_000_000, help="parameters of the model")
    add_json(parser)
    options = parser.parse_args(arguments)
    figures = []
    print(f"torch {torch.__version__}, gloo, {options.numel:,} parameters in 8 buckets, Adam; formula / measured")
    print(f"{'':<36}{'ranks':>6}" + "".join(f"{strategy:>16}" for strategy in STRATEGIES) + f"{'scratch MiB':>13}")
    context = mp.get_context("spawn")
    for ranks in options.ranks:
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            mp.spawn(_rank, (ranks, store, options.numel, results), nprocs=ranks)
        rows: dict[str, list[str]] = {}
        while not results.empty():
            _, name, strategy, measured, scratch = results.get()
            wanted = formula(PRECISIONS[name], strategy, ranks)
            rows.setdefault(name, []).append(f"{wanted:.2f} / {measured:.2f}")
            figures.append(
                {
                    "ranks": ranks,
                    "precision": name,
                    "strategy": strategy,
                    "formula": wanted,
                    "measured": measured,
                    "scratch_bytes": scratch,
                }
            )
            last = scratch / 2**20
            if strategy == STRATEGIES[-1]:
                print(f"{name:<36}{ranks:>6}" + "".join(f"{cell:>16}" for cell in rows[name]) + f"{last:>13.1f}")
    write_json(options.json, "memory", arguments, figures)

"""Sharded parameters and GeminiPlugin on GPUs: gathers over NCCL on streams of their own. All need one, most two.

`equal_bits` and `on_the_host` run on the second device too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a gather needs two GPUs")
WIDTH, LAYERS, STEPS = 512, 6, 5


def tower(device: torch.device) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).to(device)


def batch_of(rank: int, step: int, device: torch.device) -> torch.Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step)).to(device)


def let_the_host_run_ahead(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)  # some 10 ms


def on_two(function: Callable[[torch.device], None], folder: Path) -> None:
    multiprocessing.spawn(started, (function, str(folder / "store")), nprocs=2)


def started(rank: int, function: Callable[[torch.device], None], store: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=2)  # gloo for the CPU, NCCL for GPUs
    parallel_state.initialize_model_parallel()
    try:
        function(torch.device("cuda", rank))
    finally:
        dist.destroy_process_group()


def trained(
    device: torch.device, strategy: str, *, slow: bool = False, **options: Any
) -> tuple[list[float], list[Any], int]:
    """Losses, whole weights, and the most bytes of this GPU in the last steps."""
    rank = dist.get_rank()
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy,
        bucket_size=WIDTH * WIDTH,
        deterministic_reduction=True,
        **options,  # type: ignore[arg-type]
    )
    ddp = DistributedDataParallel(None, config, tower(device))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, clip_grad=1.0), [ddp])
    losses = []
    for step in range(STEPS):
        if step == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if slow:
            let_the_host_run_ahead(device)
        optimizer.zero_grad()
        loss = ddp(batch_of(rank, step, device)).square().mean()
        loss.backward()
        finalize_model_grads([ddp])
        optimizer.step()
        losses.append(loss.detach())
    most = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    with ddp.gathered():
        weights = [param.detach().cpu() for param in ddp.module.parameters()]
    return torch.stack(losses).tolist(), weights, most


def equal_bits(device: torch.device) -> None:
    module = torch.get_device_module(device)
    want, weights, whole = trained(device, "optim_grads")
    assert want[0] != want[-1]
    for options in ({}, {"reshard_after_forward": False}, {"slow": True}):
        losses, got, most = trained(device, "optim_grads_params", **options)
        assert losses == want and all(map(torch.equal, got, weights)), options
        if device.type == "cuda" and options.get(
            "reshard_after_forward", True
        ):  # half of the parameters, less three buckets
            assert most < whole
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        losses, got, _ = trained(device, "optim_grads_params", slow=True)
    assert losses == want and all(map(torch.equal, got, weights))


@two
def test_bits_are_those_of_optim_grads_on_any_stream_and_behind_slow_work(tmp_path: Path) -> None:
    on_two(equal_bits, tmp_path)


def gemini(device: torch.device, *, slow: bool = False, **options: Any) -> tuple[list[float], Any, Any]:
    plugin = GeminiPlugin(precision="bf16", min_chunk_size_m=0, search_range_m=0, hidden_dim=WIDTH, **options)
    booster, plain = Booster(plugin=plugin), tower(device)
    model, optimizer, *_ = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    losses = []
    for step in range(STEPS):
        if slow:
            let_the_host_run_ahead(device)
        optimizer.zero_grad()
        loss = model(batch_of(dist.get_rank(), step, device)).float().square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist(), model, optimizer


def on_the_host(device: torch.device) -> None:
    """Parameters there change no bit; states are stepped by the kernels of a CPU, which round otherwise."""
    want, *_ = gemini(device)
    for slow, pinned, prefetch in ((False, False, 0), (False, True, 1), (True, True, 0), (True, True, 1)):
        options = {"slow": slow, "pin_memory": pinned, "max_prefetch": prefetch}
        losses, model, _ = gemini(device, offload_param_frac=1.0, **options)
        assert losses == want, options
        assert all(unit.shard.is_pinned() == pinned for unit in model.module.engine.params.units)
        for param in (0.0, 0.5, 1.0):
            losses, _, optimizer = gemini(device, offload_param_frac=param, offload_optim_frac=1.0, **options)
            torch.testing.assert_close(losses, want, rtol=1e-2, atol=0)
            moments = [value for state in optimizer.optim.state.values() for value in state.values() if value.dim()]
            assert moments and all(value.is_cpu for value in moments)
            assert all(masters.grad.is_pinned() == pinned for masters in optimizer.engine.masters)
    if device.type != "cuda":
        return
    losses, model, _ = gemini(device, placement_policy="auto", pin_memory=True)
    torch.testing.assert_close(losses, want, rtol=1e-2, atol=0)
    assert model.module.engine.params.eviction.budget == torch.cuda.get_device_properties(device).total_memory


@two
def test_what_lies_on_the_host_trains_the_same(tmp_path: Path) -> None:
    on_two(on_the_host, tmp_path)


def test_what_lies_on_the_host_trains_the_same_on_one_gpu(tmp_path: Path) -> None:
    multiprocessing.spawn(alone, (str(tmp_path / "store"),), nprocs=1)


def alone(rank: int, store: str) -> None:
    dist.init_process_group(init_method=f"file://{store}", rank=0, world_size=1)
    try:
        on_the_host(torch.device("cuda", rank))
    finally:
        dist.destroy_process_group()


def test_files_are_refused_next_to_a_gpu(tmp_path: Path) -> None:
    for options in ({"offload_optim_frac": 0.5}, {"placement_policy": "auto", "memory_budget_bytes": 10**6}):
        with pytest.raises(ValueError, match="offload_directory is supported on CPUs only"):
            GeminiPlugin(offload_directory=str(tmp_path), **options)  # type: ignore[arg-type]

"""Sharded parameters and GeminiPlugin on GPUs: gathers over NCCL on streams of their own. All need one, most two."""

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


def tower() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).cuda()


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step)).cuda()


def on_two(function: Callable[[int], None], folder: Path) -> None:
    multiprocessing.spawn(started, (function, str(folder / "store")), nprocs=2)


def started(rank: int, function: Callable[[int], None], store: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=2)  # gloo for the CPU, NCCL for GPUs
    parallel_state.initialize_model_parallel()
    try:
        function(rank)
    finally:
        dist.destroy_process_group()


def trained(rank: int, strategy: str, *, slow: bool = False, **options: Any) -> tuple[list[float], list[Any], int]:
    """Losses, whole weights, and the most bytes of this GPU in the last steps."""
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy,
        bucket_size=WIDTH * WIDTH,
        deterministic_reduction=True,
        **options,  # type: ignore[arg-type]
    )
    ddp = DistributedDataParallel(None, config, tower())
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, clip_grad=1.0), [ddp])
    losses = []
    for step in range(STEPS):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        if slow:
            torch.cuda._sleep(20_000_000)  # some 10 ms, in which the host runs ahead
        optimizer.zero_grad()
        loss = ddp(batch_of(rank, step)).square().mean()
        loss.backward()
        finalize_model_grads([ddp])
        optimizer.step()
        losses.append(loss.detach())
    most = torch.cuda.max_memory_allocated()
    with ddp.gathered():
        weights = [param.detach().cpu() for param in ddp.module.parameters()]
    return torch.stack(losses).tolist(), weights, most


def equal_bits(rank: int) -> None:
    want, weights, whole = trained(rank, "optim_grads")
    assert want[0] != want[-1]
    for options in ({}, {"reshard_after_forward": False}, {"slow": True}):
        losses, got, most = trained(rank, "optim_grads_params", **options)
        assert losses == want and all(map(torch.equal, got, weights)), options
        if options.get("reshard_after_forward", True):  # half of the parameters, less three buckets
            assert most < whole
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        losses, got, _ = trained(rank, "optim_grads_params", slow=True)
    assert losses == want and all(map(torch.equal, got, weights))


@two
def test_bits_are_those_of_optim_grads_on_any_stream_and_behind_slow_work(tmp_path: Path) -> None:
    on_two(equal_bits, tmp_path)


def gemini(rank: int, **options: Any) -> tuple[list[float], Any]:
    plugin = GeminiPlugin(precision="bf16", min_chunk_size_m=0, search_range_m=0, hidden_dim=WIDTH, **options)
    booster, plain = Booster(plugin=plugin), tower()
    model, optimizer, *_ = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch_of(rank, step)).float().square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def states_on_the_host(rank: int) -> None:
    want, _ = gemini(rank)
    for pinned in (False, True):
        losses, optimizer = gemini(rank, offload_optim_frac=1.0, pin_memory=pinned)
        torch.testing.assert_close(losses, want, rtol=1e-2, atol=0)
        moments = [value for state in optimizer.optim.state.values() for value in state.values() if value.dim()]
        assert moments and all(not value.is_cuda and value.is_pinned() == pinned for value in moments)


@two
def test_states_on_the_host_train_the_same(tmp_path: Path) -> None:
    on_two(states_on_the_host, tmp_path)


def test_what_moves_between_ram_and_files_is_refused_beside_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="placement_policy='auto' moves chunks between RAM and files"):
        GeminiPlugin(placement_policy="auto", memory_budget_bytes=10**6, offload_directory=str(tmp_path))
    with pytest.raises(ValueError, match="Beside a GPU only the optimizer's state is offloaded so far"):
        GeminiPlugin(offload_param_frac=0.5)
    with pytest.raises(ValueError, match="offload_directory is for CPUs"):
        GeminiPlugin(offload_optim_frac=0.5, offload_directory=str(tmp_path))

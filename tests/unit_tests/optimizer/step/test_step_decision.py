"""One decision: whatever is wrong anywhere, all ranks skip, nothing changes by a bit, and the cause is named."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.logged import logged
from tests.unit_tests.optimizer.test_optimizer import ALGORITHMS
from tests.unit_tests.optimizer.test_optimizer_fp16 import assert_bit_equal, snapshot
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, wrap

LAYOUTS: dict[str, tuple[dict[str, int], str]] = {
    "replicated": ({}, "no_shard"),
    "sharded": ({}, "optim"),
    "sharded gradients": ({}, "optim_grads"),
    "instances": ({"num_distributed_optimizer_instances": 2}, "optim"),
    "experts": ({"expert_model_parallel_size": 2}, "optim"),
    "stages": ({"pipeline_model_parallel_size": 2}, "optim"),
    "tensor": ({"tensor_model_parallel_size": 2}, "no_shard"),
}


class Mixed(nn.Module):
    """A dense, a tensor-parallel and an expert parameter; an empty one and one that does not train."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, size in (("dense", 70), ("split", 33), ("expert", 41), ("empty", 0), ("frozen", 9)):
            self.register_parameter(name, nn.Parameter(torch.ones(size, dtype=dtype)))
        self.split.tensor_model_parallel = True
        self.expert.allreduce = False
        self.expert.tensor_model_parallel = True
        self.frozen.requires_grad_(False)


def one_step(chunks: list[Any], optimizer: Any, poison: tuple[int, str, float] | None) -> Any:
    """poison: (rank, parameter, value) to put into one reduced gradient of the last chunk, on one rank alone."""
    optimizer.zero_grad()
    for number, chunk in enumerate(chunks):
        module = chunk.module
        loss = sum((number + 1) * 0.25 * p.float().sum() for p in module.parameters() if p.requires_grad)
        optimizer.scale_loss(loss).backward()
    finalize_model_grads(chunks)
    if poison is not None and poison[0] == dist.get_rank():
        buffers = (*chunks[-1].grad_buffers, *chunks[-1].expert_parallel_buffers)
        for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
            for index, contract in enumerate(bucket.contracts):
                if contract.name == poison[1]:
                    bucket.valid_part(index)[:1] = poison[2]
    return optimizer.step()


@ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.in_suite()
def test_one_bad_number_on_one_rank_changes_nothing_anywhere(
    rank: int, world: int, layout: str, dtype: torch.dtype
) -> None:
    sizes, strategy = LAYOUTS[layout]
    parallel_state.initialize_model_parallel(**sizes)
    ddp = wrap(
        Mixed(dtype),
        data_parallel_sharding_strategy=strategy,
        num_distributed_optimizer_instances=sizes.get("num_distributed_optimizer_instances", 1),
        grad_reduce_in_fp32=False,
    )
    config = OptimizerConfig(**ALGORITHMS["adamw"], fp16=dtype is torch.float16, initial_loss_scale=16.0)
    optimizer = get_megatron_optimizer(config, [ddp])
    assert one_step([ddp], optimizer, None)[0]
    for name in ("dense", "split", "expert"):
        for bad in (math.nan, math.inf, -math.inf):
            parts = [
                (rank, bucket.valid_part(i).numel() > 0)
                for buffer in (*ddp.grad_buffers, *ddp.expert_parallel_buffers)
                for bucket in buffer.buckets
                for i, contract in enumerate(bucket.contracts)
                if contract.name == name
            ]
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, parts)
            holders = [r for found in everyone for r, holds in found if holds]
            before = snapshot(ddp, optimizer)
            with logged("core.optimizer.optimizer") as records:
                assert one_step([ddp], optimizer, (holders[-1], name, bad)) == (False, None, None)
            assert_bit_equal(snapshot(ddp, optimizer), before)
            if rank == 0:
                (message,) = records
                assert f"rank {holders[-1]}: the gradient of '{name}' holds {bad} in 1 of " in message, message
            else:
                assert not records
    before = snapshot(ddp, optimizer)
    assert one_step([ddp], optimizer, None)[0]
    for name, value in ddp.state_dict().items():
        assert torch.equal(value, before[0][name]) == (name in ("empty", "frozen")), name


@ranks(2)
def test_a_bad_number_in_one_virtual_chunk_skips_all_of_them(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, create_gloo_process_groups=False
    )
    chunks = [wrap(Mixed(torch.float32), use_distributed_optimizer=True) for _ in range(2)]
    optimizer = get_megatron_optimizer(OptimizerConfig(**ALGORITHMS["adamw"]), chunks)
    assert one_step(chunks, optimizer, None)[0]
    before = copy.deepcopy([snapshot(chunk, optimizer) for chunk in chunks])
    assert one_step(chunks, optimizer, (1, "dense", math.nan)) == (False, None, None)
    assert_bit_equal([snapshot(chunk, optimizer) for chunk in chunks], before)
    assert one_step(chunks, optimizer, None)[0]


@ranks(3)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_a_norm_above_the_threshold_skips_on_all_ranks(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**{**ALGORITHMS["sgd"], "lr": 1e-4}, grad_norm_skip_threshold=1000.0), [ddp]
    )
    for factor, made in ((1.0, True), (1e6, False), (1.0, True)):
        optimizer.zero_grad()
        (loss_of(ddp, rank, 0) * factor).backward()
        finalize_model_grads([ddp])
        before = snapshot(ddp, optimizer)
        with logged("core.optimizer.optimizer") as records:
            assert optimizer.step()[0] == made
        if made:
            assert not torch.equal(ddp.state_dict()["first.weight"], before[0]["first.weight"])
        else:
            assert_bit_equal(snapshot(ddp, optimizer), before)
            assert rank > 0 or "grad_norm_skip_threshold 1000" in records[0]
    assert optimizer.steps_skipped == 1


@ranks(2)
def test_a_watch_that_saw_the_cause_is_believed(rank: int, world: int) -> None:
    """After the reduction every rank holds the NaN; the watch knows the rank and the microbatch that made it."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), record_nan_in_grad=True)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [ddp])
    optimizer.zero_grad()
    with ddp.no_sync():
        loss_of(ddp, rank, 0).backward()
        loss_of(ddp, rank, 1).backward()
    (loss_of(ddp, rank, 2) * (math.nan if rank == 1 else 1.0)).backward()
    finalize_model_grads([ddp])
    assert all(bool(p.grad.isnan().any()) for p in ddp.parameters())
    with logged("core.optimizer.optimizer") as records:
        assert optimizer.step() == (False, None, None)
    assert rank > 0 or "rank 1: the gradient of 'third.bias' became non-finite in microbatch 2" in records[0], records

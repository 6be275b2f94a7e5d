"""BucketPool: where the buckets lie that fill and travel, one at each end of memory for two that follow each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.buffer.bucket_pool import BucketPool, pool_numel
from tests.unit_tests.ranks import ranks


@pytest.mark.parametrize(
    ("sizes", "expected"), [([], 0), ([7], 7), ([8, 2, 3, 8], 11), ([2, 9, 9, 1], 18), ([4, 4, 4, 4], 8)]
)
def test_memory_is_that_of_the_two_neighbours_that_are_longest_together(sizes: list[int], expected: int) -> None:
    assert pool_numel(sizes) == expected


def place(pool: BucketPool, memory: torch.Tensor) -> tuple[int, int]:
    start = memory.storage_offset() - pool.memory.storage_offset()
    return start, start + memory.numel()


def owns(pool: BucketPool, memory: torch.Tensor) -> bool:
    return memory.untyped_storage().data_ptr() == pool.memory.untyped_storage().data_ptr()


def test_neighbours_lie_at_the_two_ends() -> None:
    sizes = [8, 2, 3, 8]
    pool = BucketPool(torch.zeros(100)[10 : 10 + pool_numel(sizes)])
    held: list[torch.Tensor] = []
    places = []
    for size in sizes:
        if len(held) == 2:
            pool.release(held.pop(0))
        assert pool.has_room(size)
        held.append(pool.acquire(size))
        assert owns(pool, held[-1])
        places.append(place(pool, held[-1]))
    assert places == [(0, 8), (9, 11), (0, 3), (3, 11)]
    assert not pool.has_room(1)


def test_one_at_a_time_they_all_lie_at_the_beginning() -> None:
    """So that pages at the end, which no second bucket needs, are never there."""
    pool = BucketPool(torch.zeros(11))
    for size in (8, 2, 3, 8):
        memory = pool.acquire(size)
        assert place(pool, memory) == (0, size)
        pool.release(memory)


def test_a_bucket_that_does_not_fit_next_to_the_other_gets_memory_of_its_own() -> None:
    pool = BucketPool(torch.zeros(11))
    first = pool.acquire(8)
    assert pool.has_room(3) and not pool.has_room(4)
    further = pool.acquire(4)
    assert not owns(pool, further) and further.numel() == 4
    pool.release(further)  # nothing to give back
    assert pool.has_room(3) and not pool.has_room(4)
    pool.release(first)
    assert pool.has_room(11) and place(pool, pool.acquire(11)) == (0, 11)


class Launched:
    """A bucket in flight."""

    def __init__(self, pool: BucketPool, numel: int) -> None:
        self.pool, self.grad = pool, pool.acquire(numel)
        pool.in_flight.append((self.wait, self.grad))

    def wait(self) -> None:
        """Give the memory back."""
        assert self.pool.in_flight[0][1] is self.grad
        self.pool.release(self.grad)


def test_room_is_made_by_as_many_as_are_in_the_way() -> None:
    pool = BucketPool(torch.zeros(11))
    Launched(pool, 3)
    Launched(pool, 2)
    assert place(pool, pool.acquire(9)) == (0, 9) and len(pool.in_flight) == 1  # the second one may stay
    pool = BucketPool(torch.zeros(11))
    Launched(pool, 3)
    Launched(pool, 8)
    assert place(pool, pool.acquire(11)) == (0, 11) and not pool.in_flight


@ranks(2, timeout_s=30)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_long_parameter_is_not_paid_for_twice(rank: int, world: int, overlap: bool, mapped: bool) -> None:
    parallel_state.initialize_model_parallel()
    torch.manual_seed(3)
    layers: list[nn.Module] = [
        nn.Linear(16, size // 16, bias=False, dtype=torch.float64) for size in (2048, 64, 64, 64, 64)
    ]
    model = nn.ModuleList(layers)
    options: dict[str, Any] = {"overlap_grad_reduce": overlap, "share_host_memory": mapped, "bucket_size": 64}
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads", **options)
    ddp = DistributedDataParallel(None, config, model)
    pool = ddp.grad_buffers[0].pool
    sizes = [bucket.layout.numel for bucket in ddp.grad_buffers[0].buckets]
    assert pool is not None and pool.memory.numel() == pool_numel(sizes) < 2 * max(sizes)
    for step in range(3):
        ddp.zero_grad_buffer()
        x = torch.arange(16, dtype=torch.float64) + rank + step
        sum(layer(x).sum() for layer in ddp.module).backward()
        finalize_model_grads([ddp])
        for bucket in ddp.grad_buffers[0].buckets:
            low, high = bucket.shard_range
            used = torch.cat(
                [
                    (torch.arange(16, dtype=torch.float64) + 0.5 + step).repeat(slot.shape[0])
                    for slot in bucket.layout.slots
                ]
            )
            whole = torch.zeros(bucket.layout.numel, dtype=torch.float64)
            whole[: used.numel()] = used
            torch.testing.assert_close(bucket.memory.owned_grad, whole[low:high], rtol=0, atol=0)

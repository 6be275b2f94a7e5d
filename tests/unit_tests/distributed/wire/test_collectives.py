"""Reductions between hosts: values against a sum in fp64 on one process, whatever the sizes, dtypes and timing."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.distributed import SyncError, finalize_model_grads
from core.distributed.wire.collectives import Collectives
from core.distributed.wire.rank_order_sum import split_evenly
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def values_of(rank: int, numel: int, dtype: torch.dtype, step: int = 0) -> torch.Tensor:
    """Of a rank in a step: of very different sizes, so that a sum in another order has other bits."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = torch.randn(numel, generator=generator) * 10 ** torch.randint(-2, 2, (numel,), generator=generator)
    return (values * 100).to(dtype) if dtype is torch.int64 else values.to(dtype)


def summed(world: int, numel: int, dtype: torch.dtype, step: int = 0) -> torch.Tensor:
    return torch.stack([values_of(rank, numel, dtype, step).double() for rank in range(world)]).sum(0)


def in_rank_order(world: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The bits to expect: ((p0 + p1) + p2) + ..., in fp32 for 16 bits, rounded once."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = values_of(0, numel, dtype).to(wide)
    for rank in range(1, world):
        total = total + values_of(rank, numel, dtype).to(wide)
    return total.to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within the rounding of one result and of fp32 sums of a few ranks whose values are below 400."""
    epsilon = torch.finfo(found.dtype).eps if found.dtype.is_floating_point else 0.0
    absolute = 400 * torch.finfo(torch.float32).eps * 4 if found.dtype.is_floating_point else 0.0
    return bool(((found.double() - expected).abs() <= epsilon * expected.abs() + absolute).all())


# --- sizes -------------------------------------------------------------------------------------------------------


def test_parts_are_equal_or_the_first_ones_one_longer() -> None:
    assert split_evenly(12, 3) == [4, 4, 4]
    assert split_evenly(11, 3) == [4, 4, 3]
    assert split_evenly(1, 3) == [1, 0, 0]


# --- values ------------------------------------------------------------------------------------------------------


@ranks(2, 3, nightly=(4,))
def test_a_part_is_the_sum_of_all_ranks_in_every_dtype_and_size(rank: int, world: int) -> None:
    for dtype in DTYPES:
        for part in (1, 63, 64, 65, 1000):
            numel = part * world
            mine = slice(rank * part, (rank + 1) * part)
            expected = summed(world, numel, dtype)
            assert expected.abs().max() > 1 or part == 1
            for scale, op in ((1.0, "sum"), (0.25, "sum"), (1.0, "mean")):
                if dtype is torch.int64 and (scale, op) != (1.0, "sum"):
                    continue
                tensor = values_of(rank, numel, dtype)
                Collectives().reduce_scatter(tensor, dist.group.WORLD, "test", op, scale=scale).wait()  # type: ignore[arg-type]
                factor = scale / (world if op == "mean" else 1)
                assert close(tensor[mine], expected[mine] * factor), (dtype, part, scale, op)
                if scale == 1.0 and op == "sum":
                    assert torch.equal(tensor[mine], in_rank_order(world, numel, dtype)[mine])


@ranks(2, 3, nightly=(4,))
def test_an_all_reduce_in_rank_order_has_the_same_bits_everywhere(rank: int, world: int) -> None:
    for dtype in DTYPES:
        for numel in (1, 2, 5, 128 * world, 128 * world + 1, 3001):  # uneven, and fewer elements than ranks
            tensor = values_of(rank, numel, dtype)
            handle = Collectives(ordered=True).all_reduce(tensor, dist.group.WORLD, "test")
            handle.wait()
            handle.wait()  # the second does nothing
            assert torch.equal(tensor, in_rank_order(world, numel, dtype)), (dtype, numel)


@ranks(1, 3)
def test_rows_are_the_values_of_every_rank_in_rank_order(rank: int, world: int) -> None:
    rows = Collectives().gather_rows(torch.tensor([float(rank), 0.1], dtype=torch.float64), dist.group.WORLD, "test")
    assert rows.tolist() == [[float(other), 0.1] for other in range(world)]


@ranks(1)
def test_one_rank_only_scales_and_nothing_is_nothing(rank: int, world: int) -> None:
    for ordered in (False, True):
        collectives = Collectives(ordered=ordered)
        for call in (collectives.all_reduce, collectives.reduce_scatter):
            tensor = torch.tensor([1.0, -2.0])
            call(tensor, dist.group.WORLD, "test", scale=0.5).wait()
            assert tensor.tolist() == [0.5, -1.0]
    assert collectives.traffic.bytes_sent == 0


@ranks(2)
def test_an_empty_tensor_sends_nothing(rank: int, world: int) -> None:
    collectives = Collectives(ordered=True)
    for call in (collectives.all_reduce, collectives.reduce_scatter):
        call(torch.zeros(0), dist.group.WORLD, "test").wait()
    assert collectives.traffic.collectives == 0


@ranks(2, 3)
def test_every_byte_is_counted(rank: int, world: int) -> None:
    collectives = Collectives(ordered=True)
    collectives.reduce_scatter(torch.zeros(100 * world), dist.group.WORLD, "test").wait()
    assert (collectives.traffic.bytes_sent, collectives.traffic.collectives) == (400 * (world - 1), 1)
    collectives.begin_step()
    collectives.all_reduce(torch.zeros(world), dist.group.WORLD, "test").wait()
    assert (collectives.traffic.bytes_sent, collectives.traffic.collectives) == (8 * (world - 1), 1)


@ranks(3)
def test_groups_that_overlap_do_not_mix(rank: int, world: int) -> None:
    first, last = dist.new_group([0, 1]), dist.new_group([1, 2])
    mine = [group for group, members in ((first, (0, 1)), (last, (1, 2))) if rank in members]
    groups = [dist.group.WORLD, *mine]
    collectives = Collectives()
    tensors = [torch.full((600,), 10.0**rank) for _ in groups]
    handles = [collectives.reduce_scatter(tensor, group, "test") for tensor, group in zip(tensors, groups, strict=True)]
    for handle in reversed(handles):
        handle.wait()
    sums = {(0, 1, 2): 111.0, (0, 1): 11.0, (1, 2): 110.0}
    for tensor, group in zip(tensors, groups, strict=True):
        members = tuple(dist.get_process_group_ranks(group))
        part = 600 // len(members)
        place = dist.get_rank(group)
        assert tensor[place * part : (place + 1) * part].unique().tolist() == [sums[members]]


# --- wrapped models ----------------------------------------------------------------------------------------------


@ranks(2, nightly=(3, 4))
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_gradients_of_models_are_means_over_ranks(rank: int, world: int, strategy: str, overlap: bool) -> None:
    """Several buckets in flight from backward, and two models on the same group."""
    parallel_state.initialize_model_parallel()
    options: dict[str, Any] = {
        "data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": overlap, "share_host_memory": False,
        "bucket_size": 60,
    }  # fmt: skip
    alone = wrap(make_net(), **options)
    models = [alone]
    for step in range(4):
        if step == 2:
            models.append(wrap(make_net(), **options))
        for ddp in models:
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, step).backward()
        for ddp in models:
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), mean_over_ranks(make_net(), world, (step,)), rtol=1e-5)


class Layers(torch.nn.Module):
    """A sum over those of four layers that are asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(4)).double()

    def forward(self, used: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        inputs = torch.randn(3, 8, generator=generator, dtype=torch.float64)
        return torch.stack([layer(inputs).square().sum() for layer in self.layers[:used]]).sum()


def mean_of_layers(seed: int, used: list[int]) -> dict[str, torch.Tensor]:
    """One process: the mean over ranks, each of which uses so many layers."""
    model = Layers(seed)
    for rank, count in enumerate(used):
        if count:
            (model(count, rank) / len(used)).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def in_backward(strategy: str) -> dict[str, Any]:
    """Buckets leave in backward. Of sharded gradients there are two: a third one would wait for memory."""
    bucket_size = 128 if strategy == "optim_grads" else 1
    common = {"overlap_grad_reduce": True, "share_host_memory": False}
    return {"data_parallel_sharding_strategy": strategy, "bucket_size": bucket_size, **common}


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_a_model_that_was_dropped_in_a_step_which_some_ranks_have_begun_is_reported_at_the_next_wrap(
    rank: int, world: int, strategy: str
) -> None:
    parallel_state.initialize_model_parallel()
    dropped = wrap(Layers(1), **in_backward(strategy))
    dropped(4 if rank == 0 else 2, rank).backward()
    sizes = [bucket.layout.numel for bucket in dropped.reducer.buckets]
    del dropped
    gc.collect()
    with pytest.raises(
        SyncError, match=r"a model was deleted in the middle of a step.*launched 0 to [24] reductions each"
    ):
        wrap(Layers(2), **in_backward(strategy))
    if rank == 1:  # what rank 0 still waits for: a group does not end before its messages
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for size in sizes:
            call = Collectives().all_reduce if strategy == "no_shard" else Collectives().reduce_scatter
            call(torch.zeros(size, dtype=torch.float64), group, "test").wait()


@ranks(2, 3)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.in_suite()
def test_a_model_that_some_ranks_have_begun_to_reduce_when_another_one_is_wrapped(
    rank: int, world: int, strategy: str, order: tuple[int, int]
) -> None:
    parallel_state.initialize_model_parallel()
    options = in_backward(strategy)
    first = wrap(Layers(1), **options)
    if rank == 0:
        first(4, rank).backward()
    second = wrap(Layers(2), **options)
    second(4, rank).backward()
    for which in order:
        finalize_model_grads([(first, second)[which]])
    assert_same(whole_grads(first), mean_of_layers(1, [4] + [0] * (world - 1)), rtol=1e-12)
    assert_same(whole_grads(second), mean_of_layers(2, [4] * world), rtol=1e-12)

"""Reductions through sockets: values against a sum in fp64 on one process, whatever the sizes, dtypes and timing."""

from __future__ import annotations

import _thread
import gc
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.distributed import finalize_model_grads
from core.distributed.reduce.shared_wire import SharedWire, timeout_of
from core.distributed.wire.collectives import Collectives, InFlight
from core.distributed.wire.host_channel import PeerLost
from core.distributed.wire.rank_order_sum import split_evenly
from core.distributed.wire.socket_channel import (
    LEAST_CHUNK,
    MOST_CHUNK,
    SCRATCH,
    WINDOW,
    SocketChannel,
    chunk_bytes_for,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

CHUNK = 512  # bytes: so that tensors of a few thousand elements take many chunks
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


Channels = dict[dist.ProcessGroup, SocketChannel]


def small_chunks(*groups: dist.ProcessGroup) -> Channels:
    """A channel for each group, the world at least, with chunks of CHUNK bytes. Called by all of its ranks."""
    collectives = Collectives()
    collectives.prepare(groups or [dist.group.WORLD], torch.device("cpu"))
    for channel in collectives.exchanges.values():
        assert not channel.has_scratch
        channel.chunk_bytes = CHUNK
    return collectives.exchanges


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


def test_scratch_does_not_grow_with_the_model_and_hardly_with_the_group() -> None:
    for size in range(2, 200):
        chunk = chunk_bytes_for(size)
        assert LEAST_CHUNK <= chunk <= MOST_CHUNK and chunk % 16 == 0
        held = WINDOW * (size - 1) * chunk
        assert held <= SCRATCH or chunk == LEAST_CHUNK
        assert held > SCRATCH / 2 - WINDOW * (size - 1) * 4096, "chunks are smaller than they need be"


# --- values ------------------------------------------------------------------------------------------------------


@ranks(2, 3, nightly=(4,))
def test_a_part_is_the_sum_of_all_ranks_in_every_dtype_and_size(rank: int, world: int) -> None:
    small = small_chunks()
    for dtype in DTYPES:
        for part in (1, 63, 64, 65, 1000):  # 1000 elements of fp32 are 8 chunks
            numel = part * world
            mine = slice(rank * part, (rank + 1) * part)
            expected = summed(world, numel, dtype)
            assert expected.abs().max() > 1 or part == 1
            for scale, op in ((1.0, "sum"), (0.25, "sum"), (1.0, "mean")):
                if dtype is torch.int64 and (scale, op) != (1.0, "sum"):
                    continue
                tensor = values_of(rank, numel, dtype)
                Collectives(exchanges=small).reduce_scatter(tensor, dist.group.WORLD, op, scale=scale).wait()  # type: ignore[arg-type]
                factor = scale / (world if op == "mean" else 1)
                assert close(tensor[mine], expected[mine] * factor), (dtype, part, scale, op)
                if scale == 1.0 and op == "sum":
                    assert torch.equal(tensor[mine], in_rank_order(world, numel, dtype)[mine])


@ranks(2, 3, nightly=(4,))
def test_an_all_reduce_in_rank_order_has_the_same_bits_everywhere(rank: int, world: int) -> None:
    small = small_chunks()
    for dtype in DTYPES:
        for numel in (1, 2, 5, 128 * world, 128 * world + 1, 3001):  # uneven, and fewer elements than ranks
            tensor = values_of(rank, numel, dtype)
            handle = Collectives(ordered=True, exchanges=small).all_reduce(tensor, dist.group.WORLD)
            handle.wait()
            handle.wait()  # the second does nothing
            assert torch.equal(tensor, in_rank_order(world, numel, dtype)), (dtype, numel)


@ranks(1)
def test_one_rank_only_scales_and_nothing_is_nothing(rank: int, world: int) -> None:
    for ordered in (False, True):
        collectives = Collectives(ordered=ordered)
        for call in (collectives.all_reduce, collectives.reduce_scatter):
            tensor = torch.tensor([1.0, -2.0])
            call(tensor, dist.group.WORLD, scale=0.5).wait()
            assert tensor.tolist() == [0.5, -1.0]
    assert collectives.traffic.bytes_sent == 0 and not collectives.exchanges


@ranks(2)
def test_an_empty_tensor_sends_nothing(rank: int, world: int) -> None:
    collectives = Collectives(ordered=True)
    for call in (collectives.all_reduce, collectives.reduce_scatter):
        call(torch.zeros(0), dist.group.WORLD).wait()
    assert collectives.traffic.collectives == 0


@ranks(2, 3)
def test_every_byte_is_counted(rank: int, world: int) -> None:
    collectives = Collectives(ordered=True, exchanges=small_chunks())
    collectives.reduce_scatter(torch.zeros(100 * world), dist.group.WORLD).wait()
    assert (collectives.traffic.bytes_sent, collectives.traffic.collectives) == (400 * (world - 1), 1)
    collectives.traffic.reset()
    collectives.all_reduce(torch.zeros(1), dist.group.WORLD).wait()  # rank 0 has the one element
    assert collectives.traffic.bytes_sent == (4 * (world - 1) if rank == 0 else 4)


# --- the order of messages ---------------------------------------------------------------------------------------


HABITS: list[Callable[[InFlight], object]] = [
    lambda handle: None,
    lambda handle: (time.sleep(0.002), handle.poll()),
    lambda handle: handle.wait(),
    lambda handle: (handle.step(), time.sleep(0.001)),
]


def launch_many(rank: int, chance: random.Random, small: Channels) -> list[tuple[torch.Tensor, str, int]]:
    """Reductions of both kinds and many sizes, in flight together; in between this rank does something to one."""
    launched: list[tuple[torch.Tensor, str, int]] = []
    handles: list[InFlight] = []
    for step in range(12):
        tensor = values_of(rank, (300, 7200, 780, 18000)[step % 4], torch.float32, step)
        kind = "whole" if step % 3 == 1 else "part"
        collectives = Collectives(ordered=kind == "whole", exchanges=small)
        call = collectives.all_reduce if kind == "whole" else collectives.reduce_scatter
        handles.append(call(tensor, dist.group.WORLD))
        launched.append((tensor, kind, step))
        chance.choice(HABITS)(chance.choice(handles[-2:]))
    for handle in handles:
        handle.wait()
        assert handle.is_done() and not handle.step()
    return launched


@ranks(2, 3, nightly=(4,))
def test_ranks_that_poll_wait_and_sleep_at_different_times_pair_the_same_messages(rank: int, world: int) -> None:
    small = small_chunks()
    for turn in range(6):
        for tensor, kind, step in launch_many(rank, random.Random(100 * turn + rank), small):
            expected = summed(world, tensor.numel(), torch.float32, step)
            part = tensor.numel() // world
            where = slice(None) if kind == "whole" else slice(rank * part, (rank + 1) * part)
            assert close(tensor[where], expected[where]), (turn, step, kind)


@ranks(2)
def test_what_polls_add_is_added_without_a_wait(rank: int, world: int) -> None:
    tensor = values_of(rank, 2000, torch.float32)
    handle = Collectives(exchanges=small_chunks()).reduce_scatter(tensor, dist.group.WORLD)
    deadline = time.monotonic() + 20
    while not handle.is_done():
        assert time.monotonic() < deadline, "polling alone does not complete it"
        time.sleep(1e-4)
    mine = slice(rank * 1000, (rank + 1) * 1000)
    assert close(tensor[mine], summed(world, 2000, torch.float32)[mine])


@ranks(2)
def test_scratch_is_kept_and_bounded(rank: int, world: int) -> None:
    small = small_chunks()
    (channel,) = small.values()
    handles = [Collectives(exchanges=small).reduce_scatter(torch.zeros(4000), dist.group.WORLD) for _ in range(3)]
    assert len(channel.under_way) <= WINDOW
    for handle in handles:
        handle.wait()
    assert len(channel.free) == WINDOW and sum(len(scratch) for scratch in channel.free) == WINDOW * CHUNK
    held = {scratch.data_ptr() for scratch in channel.free}
    Collectives(ordered=True, exchanges=small).all_reduce(torch.zeros(4000), dist.group.WORLD).wait()
    assert {scratch.data_ptr() for scratch in channel.free} == held and not channel.under_way and not channel.waiting


@ranks(3)
def test_groups_that_overlap_do_not_mix(rank: int, world: int) -> None:
    first, last = dist.new_group([0, 1]), dist.new_group([1, 2])
    mine = [group for group, members in ((first, (0, 1)), (last, (1, 2))) if rank in members]
    groups = [dist.group.WORLD, *mine]
    collectives = Collectives(exchanges=small_chunks(*groups))
    tensors = [torch.full((600,), 10.0**rank) for _ in groups]
    handles = [collectives.reduce_scatter(tensor, group) for tensor, group in zip(tensors, groups, strict=True)]
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
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    channel = alone.collectives.exchanges[group]  # connected when the model is wrapped, not in backward
    channel.chunk_bytes = 64
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
    assert channel.has_scratch


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


@ranks(2, 3)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_what_a_dropped_model_had_under_way_is_not_paired_with_the_next_ones(
    rank: int, world: int, strategy: str
) -> None:
    parallel_state.initialize_model_parallel()
    options = in_backward(strategy)
    dropped = wrap(Layers(1), **options)
    dropped(4 if rank == 0 else 2, rank).backward()
    del dropped
    gc.collect()
    time.sleep(0.2 * rank)  # a rank that is still in its backward does not notice that others have dropped the model
    ddp = wrap(Layers(2), **options)
    ddp(4, rank).backward()
    finalize_model_grads([ddp])
    assert_same(whole_grads(ddp), mean_of_layers(2, [4] * world), rtol=1e-12)
    shared = SharedWire.of(parallel_state.get_data_parallel_group(with_context_parallel=True))
    assert list(shared._channels) == [1], "the dropped one's connections were cut"


@ranks(2, 3)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
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


@ranks(2, timeout_s=20)
def test_the_garbage_collector_does_not_wait_for_a_rank_that_still_has_the_model(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(Layers(1), **in_backward("optim"))
    (channel,) = ddp.collectives.exchanges.values()
    posted = channel.posted
    if rank == 0:
        ddp(4, rank).backward()
        assert posted, "what the other rank does not answer"
        del ddp, channel
        parallel_state.destroy_model_parallel()
        gc.collect()
    dist.barrier()
    if rank == 1:
        del ddp, channel
        parallel_state.destroy_model_parallel()
        gc.collect()
    deadline = time.monotonic() + 10
    while posted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not posted, "messages end, and their memory is free, when all ranks have dropped the model"


# --- ranks that fail ---------------------------------------------------------------------------------------------


@ranks(3)
def test_a_rank_that_never_comes_is_named_after_the_timeout(rank: int, world: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    collectives = Collectives()
    collectives.reduce_scatter(torch.zeros(300), group).wait()
    assert timeout_of(group) == timedelta(seconds=2)
    if rank < 2:
        begun = time.monotonic()
        with pytest.raises(PeerLost, match=rf"rank {rank}: rank .*2.* has ended, or did not come .*\[0, 1, 2\]"):
            collectives.reduce_scatter(torch.zeros(300), group).wait()
        assert time.monotonic() - begun < 20
    dist.barrier()


def _reduce_until_one_ends(rank: int, store: str, said: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    collectives = Collectives()
    tensor = torch.zeros(4_000_000)
    collectives.reduce_scatter(tensor, dist.group.WORLD).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    handles = [collectives.reduce_scatter(tensor.clone(), dist.group.WORLD) for _ in range(2)]
    for act in (handles[0].wait, handles[1].wait, lambda: collectives.reduce_scatter(tensor, dist.group.WORLD)):
        try:
            act()
        except PeerLost as error:
            said.put(str(error))
    os._exit(0)


def test_a_rank_that_dies_is_named_long_before_the_timeout(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    said = context.SimpleQueue()
    processes = [
        context.Process(target=_reduce_until_one_ends, args=(rank, str(tmp_path / "store"), said)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)  # the group's timeout is 30 minutes
    try:
        assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
        messages = []
        while not said.empty():
            messages.append(said.get())
        assert len(messages) == 3, "also the reduction behind it, and a new one"
        for message in messages:
            assert message.startswith("rank 0: rank 1 has ended, or did not come to a reduction of group [0, 1]")
    finally:
        for process in processes:
            process.kill()


def _end_with_messages_under_way(rank: int, store: str, threads_begin: bool, ended: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    collectives = Collectives()
    collectives.reduce_scatter(torch.zeros(8), dist.group.WORLD).wait()
    if rank == 1:
        ended.wait(60)
        os._exit(0)
    if not threads_begin:
        mock.patch.object(_thread, "start_new_thread", side_effect=RuntimeError("interpreter shutdown")).start()
    collectives.reduce_scatter(torch.zeros(8), dist.group.WORLD)


# False, what Python 3.12 does, has ended in gloo's own abort on a busy machine.
@pytest.mark.parametrize("threads_begin", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_program_ends_though_another_rank_does_not_answer_its_last_messages(
    tmp_path: Path, threads_begin: bool
) -> None:
    context = multiprocessing.get_context("spawn")
    ended = context.Event()
    processes = [
        context.Process(target=_end_with_messages_under_way, args=(rank, str(tmp_path / "store"), threads_begin, ended))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        processes[0].join(45)
        assert processes[0].exitcode == 0, "it has ended while the other one still ran"
        assert processes[1].is_alive()
    finally:
        ended.set()
        for process in processes:
            process.kill()

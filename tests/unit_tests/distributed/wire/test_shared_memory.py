"""Reductions in memory that ranks of one host map from each other, against sums made in fp64 from all ranks' values."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.wire import shared_memory
from core.distributed.wire.collectives import Collectives
from core.distributed.wire.shared_memory import CONTROL_BYTES, RING, HostChannel, HostMemory, Member, PeerLost
from tests.unit_tests.ranks import ranks


def channels_of(
    world: int, numel: int, dtype: torch.dtype = torch.float64, pids: list[int] | None = None
) -> tuple[list[HostChannel], list[torch.Tensor]]:
    """The channels of `world` ranks, all in this process, and their tensors."""
    memories = [mmap.mmap(-1, numel * dtype.itemsize) for _ in range(world)]
    controls = [memoryview(mmap.mmap(-1, CONTROL_BYTES)) for _ in range(world)]
    tensors = [torch.frombuffer(memory, dtype=dtype, count=numel) for memory in memories]
    pids = pids or [os.getpid()] * world
    members = [Member(r, pids[r], tensors[r], memoryview(memories[r]), controls[r]) for r in range(world)]
    return [HostChannel(None, members, rank, 0, timeout_s=20.0) for rank in range(world)], tensors


def at_once(works: list[Callable[[], None]]) -> None:
    """Run each in a thread; raise the first error."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scale", "mean"), [(1.0, False), (0.25, False), (1 / 3, True)])
def test_every_rank_gets_the_sum(world: int, dtype: torch.dtype, scale: float, mean: bool) -> None:
    numel = 70_001  # more than a chunk, and divisible by no world
    channels, tensors = channels_of(world, numel, dtype)
    generator = torch.Generator().manual_seed(world)
    for tensor in tensors:
        tensor.copy_(torch.randn(numel, generator=generator, dtype=torch.float64))
    wanted = sum(tensor.double() for tensor in tensors) * scale / (world if mean else 1)
    at_once(
        [
            lambda c=c, t=t: c.all_reduce(t, scale=scale, mean=mean).wait()
            for c, t in zip(channels, tensors, strict=True)
        ]
    )
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for tensor in tensors:
        assert torch.equal(tensor, tensors[0])
        torch.testing.assert_close(tensor.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world", [2, 3])
def test_a_part_each_and_back(world: int) -> None:
    part = 66_000
    channels, tensors = channels_of(world, part * world)
    originals = [torch.randn(part * world, dtype=torch.float64) for _ in range(world)]
    for tensor, original in zip(tensors, originals, strict=True):
        tensor.copy_(original)
    wanted = sum(originals) * 0.5
    at_once([lambda c=c, t=t: c.reduce_scatter(t, scale=0.5).wait() for c, t in zip(channels, tensors, strict=True)])
    for rank, tensor in enumerate(tensors):
        mine = slice(rank * part, (rank + 1) * part)
        torch.testing.assert_close(tensor[mine], wanted[mine], rtol=1e-14, atol=1e-14)
        other = slice(((rank + 1) % world) * part, ((rank + 1) % world + 1) * part)
        assert torch.equal(tensor[other], originals[rank][other])  # only the owner of memory writes it
    at_once([lambda c=c, t=t: c.all_gather(t).wait() for c, t in zip(channels, tensors, strict=True)])
    for tensor in tensors:
        torch.testing.assert_close(tensor, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_rank_may_have_no_part_of_a_small_bucket(world: int, dtype: torch.dtype, scale: float) -> None:
    channels, tensors = channels_of(world, 1, dtype)
    for rank, tensor in enumerate(tensors):
        tensor.fill_(rank + 1.0)
    at_once([lambda c=c, t=t: c.all_reduce(t, scale=scale).wait() for c, t in zip(channels, tensors, strict=True)])
    assert [tensor.item() for tensor in tensors] == [world * (world + 1) / 2 * scale] * world


def test_a_16_bit_sum_is_made_in_fp32_and_rounded_once() -> None:
    channels, tensors = channels_of(3, 4, torch.bfloat16)
    for tensor, value in zip(tensors, (256.0, 1.0, 1.0), strict=True):
        tensor.fill_(value)  # 256 + 1 is 256 in bf16
    at_once([lambda c=c, t=t: c.all_reduce(t).wait() for c, t in zip(channels, tensors, strict=True)])
    assert tensors[2].tolist() == [258.0] * 4


def test_nothing_is_written_while_it_is_read() -> None:
    """Ranks of unequal speed, which overwrite their memory as soon as `wait` returns."""
    world, numel, rounds = 3, 3 * 4096, 60
    channels, tensors = channels_of(world, numel)
    mixed: list[str] = []

    def work(rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        for number in range(rounds):
            tensors[rank].fill_(float(rank + number))
            kind = number % 2
            handle = channels[rank].all_reduce(tensors[rank]) if kind else channels[rank].reduce_scatter(tensors[rank])
            if torch.rand((), generator=generator) < 0.3:
                time.sleep(0.002)
            handle.wait()
            total = float(world * number + sum(range(world)))
            part = slice(None) if kind else slice(rank * 4096, (rank + 1) * 4096)
            if not bool((tensors[rank][part] == total).all()):
                mixed.append(f"rank {rank}, reduction {number}")
            tensors[rank].fill_(float("nan"))

    at_once([lambda rank=rank: work(rank) for rank in range(world)])
    assert not mixed


def test_many_in_flight_waited_for_in_any_order() -> None:
    count = 2 * RING + 5
    channels, tensors = channels_of(2, count * 8)
    for rank, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(count * 8, dtype=torch.float64) * (rank + 1))

    def work(rank: int) -> None:
        slices = tensors[rank].split(8)
        handles = [channels[rank].all_reduce(each) for each in slices]
        order = reversed(handles) if rank else handles
        for handle in order:
            handle.wait()
        assert all(handle.is_done() for handle in handles)

    at_once([lambda rank=rank: work(rank) for rank in range(2)])
    for tensor in tensors:
        assert torch.equal(tensor, torch.arange(count * 8, dtype=torch.float64) * 3)


def test_hundreds_of_buckets_are_launched_without_waiting_for_another_rank() -> None:
    """It may be in an exchange of its own with this one, between its backward and the rest of its launches."""
    channels, tensors = channels_of(2, 900 * 8)
    channels[0].timeout_s = 0.1
    handles = [channels[0].all_reduce(each) for each in tensors[0].split(8)]
    assert len(handles) == 900 and not any(handle.is_done() for handle in handles)


def test_ranks_at_different_buckets_are_refused() -> None:
    channels, tensors = channels_of(2, 64)
    sizes = [32, 64]
    found: list[str] = []

    def work(rank: int) -> None:
        with pytest.raises(PeerLost) as error:
            channels[rank].all_reduce(tensors[rank][: sizes[rank]]).wait()
        found.append(str(error.value))

    at_once([lambda rank=rank: work(rank) for rank in range(2)])
    assert sorted(found)[0].startswith("rank 0 reduces 32 elements and rank 1 64 in reduction 1 of group [0, 1]")


def test_a_rank_that_ended_is_named() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    deadline = time.monotonic() + 30
    while Path(f"/proc/{ended.pid}/stat").read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)  # not waited for: a zombie has ended too
    channels, tensors = channels_of(2, 64, pids=[os.getpid(), ended.pid])
    begun = time.monotonic()
    with pytest.raises(PeerLost, match=rf"rank 0: rank 1 \(process {ended.pid}\) has ended"):
        channels[0].all_reduce(tensors[0]).wait()
    assert time.monotonic() - begun < 10
    ended.wait()


def test_a_rank_that_ends_after_its_part_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does its part and ends while this rank looks whether those behind still run; another one is still due."""
    channels, tensors = channels_of(3, 64, pids=[os.getpid(), 1, os.getpid()])
    channels[0].timeout_s = 0.6

    def ends_now(pid: int) -> bool:
        channels[1].control[1][0] = 1
        return pid != 1

    monkeypatch.setattr(shared_memory, "runs", ends_now)
    with pytest.raises(PeerLost, match="rank 2 did not come to reduction 1"):
        channels[0].all_reduce(tensors[0]).wait()


def test_a_rank_that_does_not_come_is_named() -> None:
    channels, tensors = channels_of(2, 64)
    channels[0].timeout_s = 0.2
    with pytest.raises(PeerLost, match=r"rank 1 did not come to reduction 1 of group \[0, 1\] within 0 s"):
        channels[0].all_reduce(tensors[0]).wait()


# -- between processes ------------------------------------------------------------------------------------------------


@ranks(2, 3)
def test_memory_is_shared_between_processes(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    shared = HostMemory.share(world * 1000, torch.float32, torch.device("cpu"), [group])
    assert shared is not None and not shared.tensor.any()
    collectives = Collectives(channels=shared.channels)
    shared.tensor.fill_(rank + 1.0)
    collectives.all_reduce(shared.tensor[7:500], group, "test").wait()
    total = world * (world + 1) / 2
    assert bool((shared.tensor[7:500] == total).all()) and bool((shared.tensor[500:] == rank + 1.0).all())
    assert collectives.traffic.bytes_sent == int(2 * (world - 1) / world * 493 * 4)
    elsewhere = torch.full((10,), rank + 1.0)  # not in that memory: over the backend
    collectives.all_reduce(elsewhere, group, "test", scale=0.5).wait()
    assert bool((elsewhere == total / 2).all())


@ranks(2)
def test_ranks_wait_for_each_other_in_memory_that_no_file_holds(rank: int, world: int, tmp_path: Path) -> None:
    """Counters in a file would end every rank by a signal where the file is cut short."""
    group = dist.group.WORLD
    assert group is not None
    with open(tmp_path / f"file{rank}", "w+b") as file:
        shared = HostMemory.share(
            1000, torch.float32, torch.device("cpu"), [group], lambda nbytes: os.dup(file.fileno())
        )
        assert shared is not None
        shared.tensor.fill_(rank + 1)
        shared.channels[0].all_reduce(shared.tensor).wait()
        assert shared.tensor.tolist() == [3.0] * 1000
        file.truncate(0)
        shared.channels[0].meet()


@ranks(2)
def test_ranks_of_different_hosts_share_nothing(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    real = shared_memory._address

    def elsewhere(fd: int) -> shared_memory.Address:
        found = real(fd)
        return shared_memory.Address("another boot", found.pid, found.fd, found.identity)

    before = descriptors()
    try:
        shared_memory._address = elsewhere if rank == 1 else real
        assert HostMemory.share(1000, torch.float32, torch.device("cpu"), [group]) is None
    finally:
        shared_memory._address = real
    assert descriptors() == before


@ranks(2)
@pytest.mark.parametrize("call", ["_address", "new_mapped_file", "_open"])
def test_what_fails_on_one_rank_is_shared_by_none(rank: int, world: int, call: str) -> None:
    """No descriptor left, /proc closed, another process's memory not to be had: one rank alone may see it."""
    group = dist.group.WORLD
    assert group is not None

    def refused(*_: object) -> None:
        raise PermissionError("closed")

    real = getattr(shared_memory, call)
    try:
        if rank == 1:
            setattr(shared_memory, call, refused)
        assert HostMemory.share(1000, torch.float32, torch.device("cpu"), [group]) is None
    finally:
        setattr(shared_memory, call, real)
    assert HostMemory.share(1000, torch.float32, torch.device("cpu"), [group]) is not None


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:core.distributed")


def descriptors() -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum("memfd:core.distributed" in os.readlink(link) for link in links if link.is_symlink())


@ranks(3)
def test_a_wrapped_model_trains_alike_with_and_without_and_leaves_nothing_behind(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    before = mappings(), descriptors()
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        found = []
        for share in (True, False):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(13, 17), nn.Linear(17, 5)).double()
            config = DistributedDataParallelConfig(
                data_parallel_sharding_strategy=strategy,
                overlap_grad_reduce=True,
                bucket_size=100,
                share_host_memory=share,
            )
            ddp = DistributedDataParallel(None, config, model)
            assert bool(ddp.collectives.channels) is share
            assert ("map from each other" in ddp.describe()) is share
            for step in range(3):
                ddp.zero_grad_buffer()
                torch.manual_seed(10 * step + rank)
                ddp(torch.randn(4, 13, dtype=torch.float64)).square().sum().backward()
                finalize_model_grads([ddp])
            found.append([b.memory.owned_grad.clone() for buffer in ddp.grad_buffers for b in buffer.buckets])
            assert mappings() > before[0] or not share
            del ddp, model
            gc.collect()
        for ours, plain in zip(*found, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    assert (mappings(), descriptors()) == before

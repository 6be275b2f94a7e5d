"""HostMemory: memory of each rank that the other ranks of its host have mapped.

Ranks of one host on CPU would otherwise send gradients through sockets, where each element is copied four times. With
their memory mapped they add and copy straight from where the others' gradients and parameters lie (host_channel.py).

The memory is an anonymous file (memfd), which the others open through /proc while the model is wrapped: it has no name,
no limit of its own, and is gone with the last process that maps it. Between hosts, on GPUs and where the system has
nothing like it, torch.distributed carries everything.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core import agree
from core.distributed.wire.collectives import backend_of, timeout_of
from core.distributed.wire.host_channel import CONTROL_BYTES, HostChannel, Member

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process of this host finds another one's memory, and what tells that it is the right one."""

    boot: str  # of the host: processes of other hosts may have the same number
    pid: int
    fd: int
    identity: tuple[int, int, int]  # device, inode and size: another container counts processes of its own


class HostMemory:
    """`tensor`: [numel] of this rank, zero at first. `channels`: one for each group that reductions run over."""

    def __init__(self, tensor: torch.Tensor, channels: Sequence[HostChannel]) -> None:
        self.tensor = tensor
        self.channels = list(channels)

    @classmethod
    def share(
        cls, numel: int, dtype: torch.dtype, device: torch.device, groups: Sequence[dist.ProcessGroup]
    ) -> HostMemory | None:
        """Memory that all ranks of `groups[0]` map; the other groups are parts of it. Collective over `groups[0]`.

        None, on every rank of it, where that cannot be had.
        """
        whole = groups[0]
        if numel == 0 or device.type != "cpu" or dist.get_world_size(whole) == 1 or backend_of(whole, device) != "gloo":
            return None
        groups = [group for group in dict.fromkeys(groups) if dist.get_world_size(group) > 1]
        data_bytes = -(-numel * dtype.itemsize // PAGE) * PAGE
        own = _create(data_bytes + len(groups) * CONTROL_BYTES)
        try:
            maps, addresses = _map_all(own, whole)
        finally:
            if own is not None:
                os.close(own[0])
        if maps is None:
            return None
        members = {
            rank: Member(rank, address.pid, torch.frombuffer(memory, dtype=dtype, count=numel), memoryview(memory))
            for rank, address, memory in zip(dist.get_process_group_ranks(whole), addresses, maps, strict=True)
        }
        channels = [
            HostChannel(
                group,
                [members[r] for r in dist.get_process_group_ranks(group)],
                dist.get_rank(group),
                data_bytes + number * CONTROL_BYTES,
                timeout_of(group).total_seconds(),
            )
            for number, group in enumerate(groups)
        ]
        return cls(members[dist.get_rank()].tensor, channels)


def _create(nbytes: int) -> tuple[int, mmap.mmap] | None:
    """An anonymous file and its mapping; None where the system has none, or counters in it would not be safe."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        fd = os.memfd_create("core.distributed")
    except OSError:
        return None
    try:
        os.ftruncate(fd, nbytes)
        return fd, _map(fd, nbytes)
    except OSError:
        os.close(fd)
        return None


def _map(fd: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        memory = mmap.mmap(fd, nbytes, trackfd=False)
    else:  # such a mapping keeps a descriptor as long as it lives: one a buffer and rank of this host
        memory = mmap.mmap(fd, nbytes)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer misses of the address cache, where the system allows it
    return memory


def _map_all(
    own: tuple[int, mmap.mmap] | None, group: dist.ProcessGroup
) -> tuple[list[mmap.mmap] | None, list[Address]]:
    """Every rank's memory in group order, or None on all ranks if one of them could not map another's. Collective."""
    address = None
    if own is not None:
        with suppress(OSError):
            address = _address(own[0])
    addresses: list[Any] = list(agree.gather(address, group, "the shared memory").values())
    maps: list[mmap.mmap] | None = None
    if own is not None and None not in addresses:
        with suppress(OSError):
            here = dist.get_rank(group)
            maps = [own[1] if rank == here else _open(address) for rank, address in enumerate(addresses)]
    failed = agree.any(maps is None, group, "the shared memory")  # also: nobody closes before all have opened
    return (None if failed else maps), addresses


def _address(fd: int) -> Address:
    status = os.fstat(fd)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Address(boot, os.getpid(), fd, (status.st_dev, status.st_ino, status.st_size))


def _open(address: Address) -> mmap.mmap:
    """Map another process's memory. Raises OSError where it is not to be had."""
    if address.boot != Path("/proc/sys/kernel/random/boot_id").read_text().strip():
        raise OSError("it is on another host")
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino, status.st_size) != address.identity:
            raise OSError("the process of that number is another one")
        return _map(fd, status.st_size)
    finally:
        os.close(fd)

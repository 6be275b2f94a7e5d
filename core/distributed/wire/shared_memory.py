"""Memory that the ranks of one host map from each other, and the collectives that use it.

Otherwise the CPU ranks of one host would send gradients through sockets, which copy each element four times. With
mapped memory they add and copy directly from the other ranks' gradients and parameters. torch.distributed is used
between hosts, on GPUs, and on systems without such memory.

The memory is an anonymous file (memfd), which the other ranks open through /proc. It has no name and no size limit,
and it is freed with the last process that maps it.

Note [Counters]
All ranks launch the collectives of a group in one order. Each rank has three counters, in RAM even if its tensor is
not, that record its progress:

    counter 0: I have launched collective k: my gradients are complete and may be read
    counter 1: I have added up my part; or, in a gather, I have read what I need
    counter 2: I have read the other ranks' sums

A rank writes only its own memory, and only its own part before counter 1 of all ranks has reached k. So nothing is read
while it is written. The counters need stores that are seen in order, which x86-64 guarantees.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from core.distributed.wire.backend import backend_of, timeout_of
from core.distributed.wire.rank_order_sum import add_in_rank_order, split_evenly
from core.groups import agree
from core.watch.processes import boot_id, runs
from core.watch.waiting import DeadlockCheck, PeerLost, waiting

STRIDE = 8  # int64 between two counters: a cache line each
PLACES = 3 * STRIDE  # offset of the table of launches, after the counters
RING = 1000  # entries in the table of launches: so many can be in flight, and the next one waits
CONTROL_BYTES = 16384  # for each rank and channel: counters, then (offset, elements) of the last RING launches
SPINS = 100  # polls of the counters before this rank sleeps in between
LOOK_S = 0.5  # between two checks that the other ranks still run


@dataclass(frozen=True, slots=True)
class Member:
    """Memory of one rank, as mapped in this process."""

    rank: int  # in the job
    pid: int
    tensor: torch.Tensor  # [numel]
    memory: memoryview  # memory under `tensor`
    control: memoryview  # CONTROL_BYTES for each channel


@dataclass(frozen=True, slots=True)
class HostMemory:
    """This rank's memory, initially zero, that ranks of one host map from each other, with a channel for each group."""

    tensor: torch.Tensor
    channels: list[HostChannel]

    def of_first(self, start: int, numel: int) -> torch.Tensor:
        """Return elements [start, start + numel) of the first rank's memory, which all ranks use as common memory.

        The tensor has a separate storage.
        """
        first = self.channels[0].members[0]
        if numel == 0:  # frombuffer rejects it
            return first.tensor.new_empty(0)
        offset = start * first.tensor.itemsize
        return torch.frombuffer(first.memory, dtype=first.tensor.dtype, count=numel, offset=offset)

    @classmethod
    def share(
        cls,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[dist.ProcessGroup],
        new_file: Callable[[int], int] | None = None,
    ) -> HostMemory | None:
        """Create memory of ``numel`` elements for each rank that all ranks of ``groups[0]`` map. Collective over
        ``groups[0]``.

        Returns None on every rank if it cannot be shared; only CPU memory can. Every group, a subset of the first, gets
        a channel. ``new_file`` opens a file of the given number of bytes, if the memory should not be in RAM.
        """
        whole = groups[0]
        if numel == 0 or device.type != "cpu" or dist.get_world_size(whole) == 1 or backend_of(whole, device) != "gloo":
            return None
        groups = [group for group in dict.fromkeys(groups) if dist.get_world_size(group) > 1]
        maps = _map_all(numel * dtype.itemsize, whole, new_file)
        controls = None if maps is None else _map_all(len(groups) * CONTROL_BYTES, whole)
        if maps is None or controls is None:
            return None
        members = {
            rank: Member(
                rank,
                pid,
                torch.frombuffer(memory, dtype=dtype, count=numel),
                memoryview(memory),
                memoryview(controls[rank][1]),
            )
            for rank, (pid, memory) in maps.items()
        }
        channels = [
            HostChannel(
                group,
                [members[rank] for rank in dist.get_process_group_ranks(group)],
                dist.get_rank(group),
                number * CONTROL_BYTES,
                timeout_of(group).total_seconds(),
            )
            for number, group in enumerate(groups)
        ]
        return cls(members[dist.get_rank()].tensor, channels)


class HostChannel:
    """Collectives in the mapped memory of one group's ranks. A rank that is missing for ``timeout_s`` is an error."""

    def __init__(
        self, group: dist.ProcessGroup | None, members: Sequence[Member], rank: int, control_at: int, timeout_s: float
    ) -> None:
        self.group = group
        self.members = list(members)
        self.rank = rank  # this rank in the group
        self.own = self.members[rank].tensor
        self.control = [m.control[control_at : control_at + CONTROL_BYTES].cast("q") for m in self.members]
        self.launched = 0
        self.in_flight: list[HostHandle] = []  # in the order of their launch
        self.timeout_s = timeout_s

    def all_reduce(self, tensor: torch.Tensor, *, scale: float = 1.0, mean: bool = False) -> HostHandle:
        """Sum or average a tensor in this rank's memory over the group, in place, and multiply it by ``scale``."""
        return self._launch(tensor, (_add, _read), scale, mean)

    def reduce_scatter(self, full: torch.Tensor, *, scale: float = 1.0, mean: bool = False) -> HostHandle:
        """Reduce this rank's equal part of a tensor [n * size], in place. The other parts do not change."""
        return self._launch(full, (_add,), scale, mean)

    def all_gather(self, full: torch.Tensor) -> HostHandle:
        """Copy every other rank's equal part of a tensor [n * size] from that rank."""
        return self._launch(full, (_read,), 1.0, False)

    def meet(self) -> None:
        """Wait until every rank has called this equally often."""
        with waiting("all ranks to have read or written shards", [member.rank for member in self.members]):
            self._launch(self.own[:0], (), 1.0, False).wait()

    def _launch(self, tensor: torch.Tensor, actions: tuple[Action, ...], scale: float, mean: bool) -> HostHandle:
        if len(self.in_flight) >= RING:
            self.in_flight[0].wait()
        self.launched += 1
        control, place = self.control[self.rank], PLACES + 2 * (self.launched % RING)
        control[place] = tensor.storage_offset() - self.own.storage_offset()
        control[place + 1] = tensor.numel()
        control[0] = self.launched
        handle = HostHandle(self, self.launched, place, tensor, actions, scale, mean)
        self.in_flight.append(handle)
        return handle

    def progress(self) -> None:
        """Run every action that waits for no rank, in launch order.

        A counter means that the action is done in all earlier collectives too, so no collective overtakes an earlier
        one.
        """
        most = 2  # actions that a collective has
        for handle in self.in_flight:
            while handle.stage < min(most, len(handle.actions)) and self.has(handle.stage, handle.number):
                handle.actions[handle.stage](handle, self._tensors(handle))
                handle.stage += 1
                self.control[self.rank][handle.stage * STRIDE] = handle.number
            if handle.stage < len(handle.actions):
                most = min(most, handle.stage)
            if most == 0:
                return

    def has(self, counter: int, number: int) -> bool:
        """Return True if a counter (Note [Counters]) of all ranks has reached a collective."""
        at = counter * STRIDE
        return all(control[at] >= number for control in self.control)

    def _tensors(self, handle: HostHandle) -> list[torch.Tensor]:
        """Return every rank's tensor of a collective, flat. Raises PeerLost if one has another size."""
        numel, place = handle.tensor.numel(), handle.place
        found = []
        for member, control in zip(self.members, self.control, strict=True):
            offset, theirs = control[place], control[place + 1]
            if theirs != numel:
                raise PeerLost(
                    f"rank {self.members[self.rank].rank} reduces {numel} elements and rank {member.rank} "
                    f"{theirs} in {self._name(handle)}: they are not at the same bucket of a step, and their gradients "
                    "would be mixed. Restart from the last checkpoint"
                )
            found.append(member.tensor[offset : offset + theirs])
        return found

    def raise_if_lost(self, handle: HostHandle, waited_s: float) -> None:
        """Raise PeerLost if a rank that a collective waits for has ended, or does not arrive in time."""
        gone = {member.rank for member in self.members if not runs(member.pid)}  # first: later it may be done, and end
        at = handle.stage * STRIDE
        behind = [m for m, c in zip(self.members, self.control, strict=True) if c[at] < handle.number]
        here = self.members[self.rank].rank
        ended = [member for member in behind if member.rank in gone]
        if ended:
            raise PeerLost(
                f"rank {here}: rank {ended[0].rank} (process {ended[0].pid}) has ended, and was waited for in "
                f"{self._name(handle)}. Its own output says why; restart from the last checkpoint"
            )
        if behind and waited_s > self.timeout_s:
            raise PeerLost(
                f"rank {here}: rank {behind[0].rank} did not come to {self._name(handle)} within {self.timeout_s:.0f} "
                "s (timeout of the group). Did it leave out a backward or a finalize_model_grads?"
            )

    def _name(self, handle: HostHandle) -> str:
        return f"reduction {handle.number} of group {[member.rank for member in self.members]}"


@dataclass(slots=True, eq=False)
class HostHandle:
    """A collective in flight, with the interface of collectives.Handle."""

    channel: HostChannel
    number: int
    place: int  # position of this launch's entry in the control memory
    tensor: torch.Tensor
    actions: tuple[Action, ...]
    scale: float
    mean: bool
    stage: int = 0  # number of actions done, and the counter that this rank waits for

    def is_done(self) -> bool:
        """Make all progress that needs no other rank.

        True if nothing is left to do and no rank reads this rank's memory.
        """
        self.channel.progress()
        return self.stage == len(self.actions) and self.channel.has(self.stage, self.number)

    def wait(self) -> None:
        """Complete the collective. Afterwards no rank reads this rank's memory, so it may be written again."""
        if self not in self.channel.in_flight:
            return
        begun = looked = time.monotonic()
        looks, vain = 0, DeadlockCheck()
        while not self.is_done():
            looks += 1
            if looks < SPINS:
                os.sched_yield()
                continue
            now = time.monotonic()
            time.sleep(min(1e-3, max(2e-5, (now - begun) / 20)))  # a twentieth of a wait is lost at most
            if now - looked > LOOK_S:
                looked = now
                self.channel.raise_if_lost(self, now - begun)
                vain.refuse_deadlock()
        self.channel.in_flight.remove(self)


Action = Callable[[HostHandle, list[torch.Tensor]], None]  # called with every rank's tensor, flat, in group order


def _add(handle: HostHandle, all_of: list[torch.Tensor]) -> None:
    """Add this rank's part of every rank's tensor."""
    sizes, rank = split_evenly(handle.tensor.numel(), len(all_of)), handle.channel.rank
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    add_in_rank_order([each[mine] for each in all_of], handle.tensor[mine], handle.scale, handle.mean)


def _read(handle: HostHandle, all_of: list[torch.Tensor]) -> None:
    """Copy every other rank's part from its tensor."""
    sizes = split_evenly(handle.tensor.numel(), len(all_of))
    for rank, part in enumerate(handle.tensor.split(sizes)):
        if rank != handle.channel.rank:
            part.copy_(all_of[rank].split(sizes)[rank])


def channel_of(channels: Sequence[HostChannel], tensor: torch.Tensor, group: dist.ProcessGroup) -> HostChannel | None:
    """Return the channel whose memory contains a tensor, for collectives over a group, or None.

    The result is the same on all ranks of the group.
    """
    for channel in channels:
        offset = tensor.data_ptr() - channel.own.data_ptr()
        inside = 0 <= offset <= channel.own.nbytes - tensor.nbytes
        if channel.group is group and inside and tensor.dtype is channel.own.dtype:
            return channel
    return None


# -- mapping ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """Address of another process's memory on this host, and its identity."""

    boot: str  # boot id of the host: processes of other hosts may have the same number
    pid: int
    fd: int
    identity: tuple[int, int, int]  # device, inode and size: another container has its own process numbers


def _map_all(
    nbytes: int, group: dist.ProcessGroup, new_file: Callable[[int], int] | None = None
) -> dict[int, tuple[int, mmap.mmap]] | None:
    """Map the memory of all ranks. Collective.

    Returns process and memory by rank, or None on all ranks if one of them could not map another's memory.
    """
    what, fd, address, maps = "the memory of the ranks of one host", -1, None, {}
    try:
        with suppress(OSError):
            fd = new_mapped_file() if new_file is None else new_file(nbytes)
            os.ftruncate(fd, nbytes)
            address = _address(fd)
        addresses = agree.gather(address, group, what)
        with suppress(OSError):
            known = {rank: theirs for rank, theirs in addresses.items() if theirs is not None}
            maps = {rank: (theirs.pid, _open(theirs)) for rank, theirs in known.items()}
        failed = agree.any(len(maps) < len(addresses), group, what)  # also: none closes before all have opened
        return None if failed else maps
    finally:
        if fd >= 0:
            os.close(fd)


def new_mapped_file() -> int:
    """Create an anonymous file and return its descriptor.

    Raises OSError if the system has no such files, or counters in them would not be safe.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise OSError(f"stores are not seen in order on {platform.machine()}, or this is not Linux")
    return os.memfd_create("core.distributed")


def _address(fd: int) -> Address:
    status = os.fstat(fd)
    return Address(boot_id(), os.getpid(), fd, (status.st_dev, status.st_ino, status.st_size))


def _open(address: Address) -> mmap.mmap:
    """Map a process's memory. Raises OSError if that is not possible."""
    if address.boot != boot_id():
        raise OSError("it is on another host")
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino, status.st_size) != address.identity:
            raise OSError("the process of that number is another one")
        if sys.version_info >= (3, 13):
            memory = mmap.mmap(fd, status.st_size, trackfd=False)
        else:  # such a mapping keeps a descriptor as long as it lives: one a buffer and rank of this host
            memory = mmap.mmap(fd, status.st_size)
    finally:
        os.close(fd)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer misses of the address cache, where the system allows it
    return memory

"""HostChannel: reductions and gathers among ranks that have mapped each other's memory.

All ranks launch them in one order, as on a communicator. Counters in the same memory tell what a rank has done:

    counter 0: I have launched reduction k: my gradients are complete and may be read
    counter 1: I have added up my part of it; or, of a gather, I have read what I need
    counter 2: I have read the other ranks' sums

A rank writes only its own memory, and only its own part before counter 1 is everybody's; so nothing is read while it is
written. Sums are made in rank order. The counters rely on stores being seen in order, as x86-64 guarantees.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from core.distributed.wire.rank_order_sum import add_in_rank_order, split_evenly

Action = Callable[[list[torch.Tensor]], None]  # given every rank's tensor, flat, in group order

STAGES = 3
STRIDE = 8  # int64 between two counters: a cache line each
RING = 1000  # launches whose place is told at a time: as many buckets can be in flight, and a further one waits
CONTROL_BYTES = 16384  # of one rank and channel: counters, then (offset, elements) of the last RING launches
SPINS = 100  # looks at a counter before this rank sleeps in between
LOOK_S = 0.5  # between two looks whether the ranks waited for still run


class PeerLost(RuntimeError):
    """A rank has ended, does not come, or came with another reduction."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's memory as this process sees it."""

    rank: int  # in the job
    pid: int
    tensor: torch.Tensor  # [numel]
    memory: memoryview  # all of it, control included


class HostChannel:
    """The memory of one group's ranks. `members` in group order."""

    def __init__(
        self, group: dist.ProcessGroup | None, members: Sequence[Member], rank: int, control_at: int, timeout_s: float
    ) -> None:
        self.group = group
        self.members = list(members)
        self.rank = rank  # this one, in the group
        self.size = len(members)
        self.own = self.members[self.rank].tensor
        self.first_byte = self.own.data_ptr()
        self.end_byte = self.first_byte + self.own.numel() * self.own.element_size()
        self.control = [m.memory[control_at : control_at + CONTROL_BYTES].cast("q") for m in self.members]
        self.launched = 0
        self.in_flight: list[HostHandle] = []  # in the order of their launch
        self.timeout_s = timeout_s

    def holds(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Can a reduction of this tensor over that group run here? The same on all ranks of the group."""
        start = tensor.data_ptr()
        inside = self.first_byte <= start and start + tensor.numel() * tensor.element_size() <= self.end_byte
        return group is self.group and inside and tensor.dtype is self.own.dtype

    # -- what can be launched ---------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, *, scale: float = 1.0, mean: bool = False) -> HostHandle:
        """Sum (or mean) of the tensor over the group, times `scale`, on every rank; in place."""

        def add(parts: list[torch.Tensor]) -> None:
            low, high = self._part(tensor.numel(), self.rank)
            add_in_rank_order([part[low:high] for part in parts], tensor[low:high], scale, mean)

        def read(parts: list[torch.Tensor]) -> None:
            for rank, part in enumerate(parts):
                if rank != self.rank:
                    low, high = self._part(tensor.numel(), rank)
                    tensor[low:high].copy_(part[low:high])

        return self._launch(tensor, [add, read])

    def reduce_scatter(self, full: torch.Tensor, *, scale: float = 1.0, mean: bool = False) -> HostHandle:
        """The same for this rank's equal part of `full` alone; the rest of it stays what it was."""

        def add(parts: list[torch.Tensor]) -> None:
            low, high = self._part(full.numel(), self.rank)
            add_in_rank_order([part[low:high] for part in parts], full[low:high], scale, mean)

        return self._launch(full, [add])

    def all_gather(self, full: torch.Tensor) -> HostHandle:
        """Copy every other rank's equal part of `full` from it."""

        def read(parts: list[torch.Tensor]) -> None:
            for rank, part in enumerate(parts):
                if rank != self.rank:
                    low, high = self._part(full.numel(), rank)
                    full[low:high].copy_(part[low:high])

        return self._launch(full, [read])

    def _part(self, numel: int, rank: int) -> tuple[int, int]:
        """[start, end) of a rank's part: equal ones where the size allows, else the first ones one longer."""
        sizes = split_evenly(numel, self.size)
        start = sum(sizes[:rank])
        return start, start + sizes[rank]

    # -- how it runs ------------------------------------------------------------------------------------------------

    def _launch(self, tensor: torch.Tensor, actions: list[Action]) -> HostHandle:
        if len(self.in_flight) >= RING:
            self.in_flight[0].wait()
        self.launched += 1
        control = self.control[self.rank]
        place = _place_of(self.launched)
        control[place] = tensor.storage_offset() - self.own.storage_offset()
        control[place + 1] = tensor.numel()
        control[0] = self.launched
        handle = HostHandle(self, self.launched, tensor.numel(), actions)
        self.in_flight.append(handle)
        return handle

    def parts(self, number: int, numel: int) -> list[torch.Tensor]:
        """Every rank's tensor of reduction `number`, flat. Raises PeerLost where one has another size."""
        place = _place_of(number)
        found = []
        for member, control in zip(self.members, self.control, strict=True):
            offset, theirs = control[place], control[place + 1]
            if theirs != numel:
                raise PeerLost(
                    f"rank {self.members[self.rank].rank} reduces {numel} elements and rank {member.rank} {theirs} in "
                    f"reduction {number} of group {[m.rank for m in self.members]}: they are not at the same bucket of "
                    "a step, and their gradients would be mixed. Restart from the last checkpoint"
                )
            found.append(member.tensor[offset : offset + numel])
        return found

    def has(self, stage: int, number: int) -> bool:
        """Have all ranks done this stage of reduction `number`?"""
        at = stage * STRIDE
        return all(control[at] >= number for control in self.control)

    def tell(self, stage: int, number: int) -> None:
        """This rank has done this stage of it, and of all before it."""
        self.control[self.rank][stage * STRIDE] = number

    def wait_for(self, stage: int, number: int) -> None:
        """Wait until all ranks have done it. Raises PeerLost when one has ended or does not come."""
        for _ in range(SPINS):
            if self.has(stage, number):
                return
            os.sched_yield()
        begun = looked = time.monotonic()
        while not self.has(stage, number):
            now = time.monotonic()
            time.sleep(pause_s(now - begun))
            if now - looked > LOOK_S:
                looked = now
                self._look_for_lost(stage, number, now - begun)

    def ended(self) -> list[Member]:
        """The ranks whose processes have ended."""
        return [member for member in self.members if not _runs(member.pid)]

    def _look_for_lost(self, stage: int, number: int, waited_s: float) -> None:
        gone = {member.rank for member in self.ended()}  # first: later it may be done, and end
        behind = [m for m, c in zip(self.members, self.control, strict=True) if c[stage * STRIDE] < number]
        here = self.members[self.rank].rank
        where = f"reduction {number} of group {[m.rank for m in self.members]}"
        ended = [member for member in behind if member.rank in gone]
        if ended:
            raise PeerLost(
                f"rank {here}: rank {ended[0].rank} (process {ended[0].pid}) has ended, and was waited for in {where}. "
                "Its own output says why; restart from the last checkpoint"
            )
        if behind and waited_s > self.timeout_s:
            raise PeerLost(
                f"rank {here}: rank {behind[0].rank} did not come to {where} within {self.timeout_s:.0f} s (timeout of "
                "the group). Did it leave out a backward or a finalize_model_grads?"
            )

    def poll(self, handle: HostHandle) -> None:
        """Do the stages of a reduction, and of earlier ones, that wait for no rank; none before an earlier one's."""
        most = STAGES
        for other in self.in_flight:
            if other.number > handle.number or most == 0:
                break
            while other.stage < min(most, len(other.actions)) and self.has(other.stage, other.number):
                other.run(other.stage + 1)
            if other.stage < len(other.actions):
                most = min(most, other.stage)

    def advance(self, handle: HostHandle, stages: int) -> None:
        """Do the first `stages` stages of a reduction, and before each of them the same stage of earlier ones."""
        for other in self.in_flight:
            if other.number > handle.number:
                break
            other.run(stages)


class HostHandle:
    """A reduction in flight; the same face as collectives.Handle."""

    def __init__(self, channel: HostChannel, number: int, numel: int, actions: list[Action]) -> None:
        self.channel = channel
        self.number = number
        self.numel = numel
        self.actions = actions
        self.stage = 0  # actions done

    def is_done(self) -> bool:
        """Is there nothing left to do, and does no rank read this one's memory any more?"""
        return self.stage == len(self.actions) and self.channel.has(self.stage, self.number)

    def poll(self) -> bool:
        """Do what needs no waiting; would `wait` return at once?"""
        if not self.is_done():
            self.channel.poll(self)
        return self.is_done()

    def step(self) -> bool:
        """Wait for what the next stage needs, and do it; False when none is left.

        Several handles stepped in turn wait for each other's ranks once a stage, instead of once a stage and handle.
        """
        if self.stage < len(self.actions):
            self.channel.advance(self, self.stage + 1)
        return self.stage < len(self.actions)

    def wait(self) -> None:
        """Complete it. Afterwards no rank reads this one's memory any more: it may be written again."""
        if self in self.channel.in_flight:
            self.channel.advance(self, len(self.actions))
            self.channel.wait_for(len(self.actions), self.number)
            self.channel.in_flight.remove(self)

    def run(self, stages: int) -> None:
        """Do stages up to this number; HostChannel.advance keeps the order."""
        while self.stage < min(stages, len(self.actions)):
            self.channel.wait_for(self.stage, self.number)
            self.actions[self.stage](self.channel.parts(self.number, self.numel))
            self.stage += 1
            self.channel.tell(self.stage, self.number)


def _place_of(number: int) -> int:
    """Where in the control memory a launch tells its place."""
    return STAGES * STRIDE + 2 * (number % RING)


def pause_s(waited_s: float) -> float:
    """How long to sleep after a wait so long: short ones are looked at often, a twentieth of a wait is lost at most."""
    return min(1e-3, max(2e-5, waited_s / 20))


def _runs(pid: int) -> bool:
    """Is there a process of that number that has not ended?"""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"

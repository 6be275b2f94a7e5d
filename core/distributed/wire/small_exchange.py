"""SmallExchange: a few numbers of every rank of a group, put together on all of them, for what each step waits for.

Between hosts, and on GPUs, that is an all-reduce. Ranks of one host write theirs into memory that the others have
mapped, and every rank reads all of them: some microseconds where gloo's smallest all-reduce takes 0.3 to 0.9 ms. All
ranks add the same numbers in the same order, so they hold the same bits.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from core.distributed.wire.collectives import Collectives, InFlight, agree_max
from core.distributed.wire.host_memory import HostMemory
from core.waiting import waiting


class SmallExchange:
    """The `numel` fp64 numbers of each rank of `group`. Made by all of its ranks together.

    share_memory: may ranks of one host read them from each other's memory? Alike on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, numel: int, device: torch.device, *, share_memory: bool) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.collectives = Collectives()
        size = dist.get_world_size(group)
        self.memory: HostMemory | None = None
        if share_memory:
            self.memory = HostMemory.share(size * numel, torch.float64, device, [group])
        if self.memory is not None:
            self.rows = self.memory.tensor.view(size, numel)
            # What is unread and its channel hold each other, and with them mapped memory.
            weakref.finalize(self, self.memory.channels[0].in_flight.clear)
        self.unread: InFlight | None = None  # this rank's last numbers, which others may still be reading

    def reduce(self, values: torch.Tensor, *, maxima: int = 0) -> torch.Tensor:
        """The largest of all ranks' first `maxima` numbers, and the sums of the others, [numel]. Collective.

        values: overwritten perhaps. A largest among NaN is not defined.
        """
        if self.memory is not None:
            with waiting("the gradient norm", self.group):
                rows = self._rows_of_all(values)
            return torch.cat([rows[:, :maxima].amax(0), rows[:, maxima:].sum(0)]) if maxima else rows.sum(0)
        works: list[InFlight | dist.Work] = []
        if maxima:
            works.append(agree_max(values[:maxima], self.group))
        if maxima < values.numel():
            works.append(self.collectives.all_reduce(values[maxima:], self.group))
        with waiting("the gradient norm", self.group):
            for work in works:
                work.wait()
        return values

    def _rows_of_all(self, values: torch.Tensor) -> torch.Tensor:
        """[ranks, numel], group order."""
        assert self.memory is not None, "see reduce"
        if self.unread is not None:
            self.unread.wait()
        self.rows[self.rank].copy_(values)
        self.unread = self.memory.channels[0].all_gather(self.memory.tensor)
        while self.unread.step():  # reads; that others have read is waited for next time, when they long have
            pass
        return self.rows

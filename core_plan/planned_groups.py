"""Process groups of a rank that is planned but does not run: their sizes, members and traffic.

Layers and contracts ask a group for its size and this rank's index. Both follow from the grid of ranks, so one process
can plan any rank of any world size. torch.distributed calls a method of the group for each collective. The methods here
move no data, count bytes, and return at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import EmbeddingRule, RankGrid, group_ranks


class NoWork:
    """A completed collective. ``memory`` is held by the backend until the wait."""

    def __init__(self, memory: Tensor | None = None) -> None:
        self.memory = memory

    def wait(self, timeout: Any = None) -> bool:
        """Return True at once."""
        self.memory = None
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


class Ledger:
    """Record of the traffic of a planned rank. ``over_gloo`` is True for ranks on CPU."""

    def __init__(self, *, over_gloo: bool) -> None:
        self.over_gloo = over_gloo
        self.during = ""  # the caller's label for the running part
        self.sent: defaultdict[Sent, list[int]] = defaultdict(lambda: [0, 0])  # [calls, bytes]


class Sent(NamedTuple):
    """Key of the calls of one collective on one group."""

    during: str
    group: str
    collective: str


class PlannedGroup:
    """Replacement for a ProcessGroup of ``members``; ``member`` is the planned rank."""

    def __init__(self, kind: str, members: Sequence[int], member: int, ledger: Ledger) -> None:
        self.kind = kind
        self.members = members
        self.place = members.index(member)
        self.ledger = ledger

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.members)

    def rank(self) -> int:
        """Return the index of the planned rank."""
        return self.place

    def count(self, collective: str, nbytes: float) -> NoWork:
        """Record one collective with the bytes that this rank sends."""
        row = self.ledger.sent[Sent(self.ledger.during, self.kind, collective)]
        row[0] += 1
        row[1] += int(nbytes)
        return NoWork()

    def _share(self, nbytes: int) -> float:
        """Return the bytes of a tensor of all ranks' parts, without this rank's part."""
        return nbytes * (self.size() - 1) / self.size()

    # -- called by torch.distributed; the names of torch 2.13, then of 2.11 -------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> NoWork:
        """Count a ring, which sends each part twice."""
        return self.count("all_reduce", 2 * self._share(sum(tensor.nbytes for tensor in tensors)))

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any = None) -> NoWork:
        """Count a ring, which sends all parts but one. gloo gathers into its own memory, and copies."""
        self.count("all_gather", self._share(output.nbytes))
        return NoWork(torch.empty_like(output) if self.ledger.over_gloo else None)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any = None) -> NoWork:
        """Count a ring, which sends all parts but one."""
        return self.count("reduce_scatter", self._share(given.nbytes))

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int], options: Any = None
    ) -> NoWork:
        """Count all parts but this rank's own."""
        return self.count("all_to_all", self._share(given.nbytes))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor], options: Any = None) -> NoWork:
        """Count a ring, which sends all parts but one."""
        return self.count("all_gather", self._share(sum(part.nbytes for part in outputs[0])))

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> NoWork:
        """Count one tensor: each rank forwards it."""
        return self.count("broadcast", sum(tensor.nbytes for tensor in tensors))

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> NoWork:
        """Count one message."""
        return self.count("send", sum(tensor.nbytes for tensor in tensors))

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


class PlannedGroups(ProcessGroups):
    """All process groups of one rank of a grid, with the record of their traffic."""

    grid: RankGrid
    ledger: Ledger
    # Known slowest link and number of machines of each kind of group, by its name and the ranks per machine.
    links: dict[tuple[str, int], str]
    machines: dict[tuple[str, int], int]

    def _place(self, name: str) -> tuple[int, int]:
        group: Any = self._field(name)
        return (0, 1) if group is None else (group.rank(), group.size())

    def ranks(self, name: str) -> list[int]:
        """Return the global ranks of the group ``name``, ascending."""
        group: Any = self.require(name)
        return list(group.members)


def planned_groups(
    grid: RankGrid,
    rank: int,
    *,
    num_instances: int = 1,
    embedding_ranks: EmbeddingRule | None = None,
    over_gloo: bool = False,
) -> PlannedGroups:
    """Create the groups of ``rank`` as initialize_model_parallel would. Pure: O(size of the groups)."""
    ledger = Ledger(over_gloo=over_gloo)
    members = group_ranks(grid, rank, num_instances=num_instances, embedding_ranks=embedding_ranks)
    planned: dict[str, Any] = {kind: PlannedGroup(kind, ranks, rank, ledger) for kind, ranks in members.items()}
    groups = PlannedGroups(**planned)
    vars(groups).update(grid=grid, ledger=ledger, links={}, machines={})
    return groups

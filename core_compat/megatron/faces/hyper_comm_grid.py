"""Grids of ranks with groups selected by name: HyperCommGrid creates groups, RankGenerator only computes ranks.

Both have Megatron's names and arguments. core.groups.rank_grid has the grids that parallel_state uses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from core.groups.rank_grid import RankGrid
from core.watch.waiting import waiting

__all__ = ["HyperCommGrid", "RankGenerator"]


def groups_along(shape: Sequence[int], axes: Iterable[int]) -> list[list[int]]:
    """Return the ranks of every group that spans ``axes`` of a grid, whose last axis varies fastest."""
    inside = sorted(axes)
    outside = [axis for axis in range(len(shape)) if axis not in inside]
    ranks = np.arange(math.prod(shape)).reshape(shape).transpose(*outside, *inside)
    groups: list[list[int]] = ranks.reshape(-1, math.prod(shape[axis] for axis in inside)).tolist()
    return groups


def new_groups(members: Iterable[Sequence[int]], **options: Any) -> Any:
    """Create a process group for each list of ranks, and return this rank's group or None.

    Collective over the world.
    """
    mine = None
    for ranks in members:
        with waiting(f"a group of ranks {list(ranks)}", dist.group.WORLD):
            group = dist.new_group(list(ranks), **options)
        mine = group if dist.get_rank() in ranks else mine
    return mine


def _refuse_view(view: str | None) -> None:
    if view is not None:
        raise ValueError(f"view={view!r}: a second factorisation is not supported; make a second HyperCommGrid")


class RankGenerator:
    """All groups of a grid of ranks, from sizes whose product is its number of ranks. Pure arithmetic.

    Either ep or cp is 1, because dense parameters and experts each have their own grid.

    Args:
        tp (int): Tensor-parallel size.
        ep (int): Expert-parallel size.
        dp (int): Data-parallel size.
        pp (int): Pipeline-parallel size.
        cp (int): Context-parallel size.
        order (str): Axes from the smallest stride to the largest, such as 'tp-cp-ep-dp-pp'.
        rank_offset (int, optional): Global rank of the first rank.
        gtp_remat (int, optional): Must be 1.

    Raises:
        ValueError: If ep and cp are both above 1, or gtp_remat is not 1.
    """

    def __init__(
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0, gtp_remat: int = 1
    ) -> None:
        if gtp_remat != 1:
            raise ValueError(f"gtp_remat={gtp_remat} is not supported; leave it at 1")
        if ep > 1 and cp > 1:
            raise ValueError(f"ep is {ep} and cp {cp}: one grid has experts or a split sequence, make a grid for each")
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.rank_offset = rank_offset
        self.world_size = tp * ep * dp * pp * cp
        # The grid that is not used gets the same pipeline groups.
        self.grid = RankGrid(self.world_size, tp=tp, pp=pp, cp=cp, ep=ep, expt_tp=tp * cp, order=order)
        self.order = self.grid.order
        self.name_to_size = {"tp": tp, "ep": ep, "dp": dp, "pp": pp, "cp": cp}
        self.ordered_size = [self.name_to_size[token] for token in self.grid.axes]

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return, for each axis of ``order``, True if ``token`` contains it."""
        return [axis in token.split("-") for axis in order.split("-")]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the groups that span the axes of ``token``, such as 'tp-dp'."""
        groups = self.grid.groups(token, expert=self.ep > 1)
        return [[rank + self.rank_offset for rank in group] for group in groups]


class HyperCommGrid:
    """Grid of ranks with named dimensions, whose groups are created on demand.

        grid = HyperCommGrid([2, 4], ["tp", "dp"])
        tp_group = grid.create_pg("tp")

    Args:
        shape (Sequence[int]): Size of each dimension. The first has the smallest stride.
        dim_names (Sequence[str]): Name of each dimension.
        rank_offset (int, optional): Global rank of the first rank.
        backend (str, optional): Backend of the groups.
    """

    def __init__(
        self, shape: Sequence[int], dim_names: Sequence[str], rank_offset: int = 0, backend: str | None = None
    ) -> None:
        if len(shape) != len(dim_names) or len(set(dim_names)) != len(dim_names):
            raise ValueError(f"shape {list(shape)} and dim_names {list(dim_names)}: give each dimension one name")
        self.shape, self.dim_names = list(shape), list(dim_names)
        self.rank_offset, self.backend = rank_offset, backend
        self.size = math.prod(shape)
        world = int(os.environ.get("WORLD_SIZE", 0)) or dist.get_world_size()
        if rank_offset < 0 or rank_offset + self.size > world:
            raise RuntimeError(
                f"a grid of {self.size} ranks from rank {rank_offset} on does not fit into a world of {world} ranks"
            )
        self._groups: dict[tuple[int, ...], Any] = {}

    def _axes(self, dims: str | Sequence[str]) -> tuple[int, ...]:
        names = [dims] if isinstance(dims, str) else list(dims)
        unknown = [name for name in names if name not in self.dim_names]
        if unknown or not names:
            raise KeyError(f"{unknown or 'no dimension'} of a grid with {self.dim_names}")
        # Reversed, because the last axis varies fastest in numpy.
        return tuple(sorted(len(self.shape) - 1 - self.dim_names.index(name) for name in names))

    def get_rank_enum(self, dims: str | Sequence[str], *, view: str | None = None) -> list[list[int]]:
        """Return the ranks of every group that spans ``dims``. The dimension with the smallest stride varies
        fastest.
        """
        _refuse_view(view)
        return [[self.rank_offset + rank for rank in g] for g in groups_along(self.shape[::-1], self._axes(dims))]

    def create_pg(self, dims: str | Sequence[str], *, view: str | None = None, **kwargs: Any) -> Any:
        """Create the groups that span ``dims`` and return this rank's.

        Collective: every rank of the world must call this.

        Raises:
            KeyError: If they have already been created.
        """
        axes = self._axes(dims)
        if axes in self._groups:
            raise KeyError(f"the group {dims} has already been created; get_pg({dims!r}) gives it")
        self._groups[axes] = new_groups(self.get_rank_enum(dims, view=view), backend=self.backend, **kwargs)
        return self._groups[axes]

    def get_pg(self, dims: str | Sequence[str], *, view: str | None = None) -> Any:
        """Return this rank's group that spans ``dims``.

        Raises:
            KeyError: If it was not created.
        """
        _refuse_view(view)
        if self._axes(dims) not in self._groups:
            raise KeyError(f"the group {dims} has not been created; call create_pg({dims!r}) on every rank first")
        return self._groups[self._axes(dims)]

    def is_current_rank_in_grid(self) -> bool:
        """Return ``True`` if this rank is in the grid."""
        return self.rank_offset <= dist.get_rank() < self.rank_offset + self.size

    def destroy(self) -> None:
        """Destroy the groups that were created."""
        for group in filter(None, self._groups.values()):
            dist.destroy_process_group(group)
        self._groups.clear()

"""ProcessGroupMesh: the world as a grid of ranks, with groups along its axes; the last axis varies fastest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from core.watch.waiting import waiting

Coordinate = tuple[int, ...]


class ProcessGroupMesh:
    """`ProcessGroupMesh(2, 2)` arranges four ranks: rank r is at (r // 2, r % 2).

    Groups are made at the first call for an axis, which is collective over the world, and kept. groups: this rank's
    groups along single axes that exist already; the mesh hands them out and never destroys them.
    Raises ValueError where the sizes do not give the world's size.
    """

    def __init__(self, *size: int, groups: Mapping[int, Any] | None = None) -> None:
        if math.prod(size) != dist.get_world_size():
            raise ValueError(f"a mesh of {size} has {math.prod(size)} ranks, and the world {dist.get_world_size()}")
        self.shape, self.rank = tuple(size), dist.get_rank()
        self._given = {_rows(axis, None, self.shape): group for axis, group in (groups or {}).items()}
        self._groups: dict[Any, Any] = dict(self._given)

    def size(self, dim: int | None = None) -> int | Coordinate:
        return self.shape if dim is None else self.shape[dim]

    def coordinate(self, dim: int | None = None) -> int | Coordinate:
        """This rank's place along an axis, or along all."""
        here = self.unravel(self.rank, self.shape)
        return here if dim is None else here[dim]

    @staticmethod
    def unravel(rank: int, shape: Coordinate) -> Coordinate:
        return tuple(int(place) for place in np.unravel_index(rank, shape))

    @staticmethod
    def ravel(coord: Coordinate, shape: Coordinate, mode: str = "raise") -> int:
        """The rank at coordinates; mode 'wrap' or 'clip' for those outside, as NumPy's ravel_multi_index."""
        return int(np.ravel_multi_index(coord, shape, mode=mode))

    get_ranks_in_group = staticmethod(dist.get_process_group_ranks)

    @staticmethod
    def get_coords_along_axis(base_coord: Coordinate, axis: Any, indices_at_axis: Any) -> list[Coordinate]:
        """The coordinates that differ from `base_coord` along the axes only, at the places given for each axis."""
        places = dict(_rows(axis, indices_at_axis, base_coord))
        return list(itertools.product(*(places.get(dim, (here,)) for dim, here in enumerate(base_coord))))

    def create_group_along_axis(
        self, axis: int | Sequence[int], indices_at_axis: Any = None, backend: str | None = None
    ) -> Any:
        """Make the groups of ranks that differ along the axes only; returns this rank's. Collective over the world.

        indices_at_axis: the places that belong to the groups; None for all. A rank at no such place gets None.
        """
        rows = _rows(axis, indices_at_axis, self.shape)
        axes, places = [dim for dim, _ in rows], [list(row) for _, row in rows]
        found = None
        for base in itertools.product(*(range(1 if dim in axes else size) for dim, size in enumerate(self.shape))):
            ranks = [self.ravel(coord, self.shape) for coord in self.get_coords_along_axis(base, axes, places)]
            with waiting(f"a group of ranks {ranks}", dist.group.WORLD):
                group = dist.new_group(ranks, backend=backend)
            found = group if self.rank in ranks else found
        self._groups[rows] = found
        return found

    def get_group_along_axis(
        self, axis: int | Sequence[int], indices_at_axis: Any = None, backend: str | None = None
    ) -> Any:
        """`create_group_along_axis`, or the group that it made before."""
        made = self._groups.get(_rows(axis, indices_at_axis, self.shape), self)  # a rank that is in no group has None
        return self.create_group_along_axis(axis, indices_at_axis, backend) if made is self else made

    def destroy_mesh_process_groups(self) -> None:
        """Destroy this rank's groups that the mesh has made."""
        for rows, group in self._groups.items():
            if group is not None and group is not self._given.get(rows):
                dist.destroy_process_group(group)
        self._groups = dict(self._given)


def _rows(axis: Any, places: Any, shape: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The axes, ascending, and the places along each."""
    axes = [axis] if isinstance(axis, int) else axis
    rows = [range(shape[dim]) for dim in axes] if places is None else [places] if isinstance(axis, int) else places
    return tuple(sorted((dim, tuple(row)) for dim, row in zip(axes, rows, strict=True)))

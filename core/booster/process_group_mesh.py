"""ProcessGroupMesh: the world as a grid of ranks, with process groups along its axes. The last axis varies fastest."""

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
    """Grid of all ranks. ``ProcessGroupMesh(2, 2)`` arranges four ranks, with rank r at (r // 2, r % 2).

    The groups along an axis are created by the first call for that axis, which is collective over the world, and are
    cached. Existing ``groups`` by axis are returned and never destroyed. Raises ValueError if the product of the sizes
    is not the world size.
    """

    def __init__(self, *size: int, groups: Mapping[int, Any] | None = None) -> None:
        if math.prod(size) != dist.get_world_size():
            raise ValueError(f"a mesh of {size} has {math.prod(size)} ranks, and the world {dist.get_world_size()}")
        self.shape, self.rank = tuple(size), dist.get_rank()
        self._existing = {_rows(axis, None, self.shape): group for axis, group in (groups or {}).items()}
        self._groups: dict[Any, Any] = dict(self._existing)

    def size(self, dim: int | None = None) -> int | Coordinate:
        return self.shape if dim is None else self.shape[dim]

    def coordinate(self, dim: int | None = None) -> int | Coordinate:
        """Return this rank's coordinate along axis ``dim``, or along all axes if it is ``None``."""
        here = self.unravel(self.rank, self.shape)
        return here if dim is None else here[dim]

    @staticmethod
    def unravel(rank: int, shape: Coordinate) -> Coordinate:
        return tuple(int(place) for place in np.unravel_index(rank, shape))

    @staticmethod
    def ravel(coord: Coordinate, shape: Coordinate, mode: str = "raise") -> int:
        """Return the rank at a coordinate.

        ``mode`` is 'raise', 'wrap' or 'clip' for coordinates outside, as in NumPy's ravel_multi_index.
        """
        return int(np.ravel_multi_index(coord, shape, mode=mode))

    get_ranks_in_group = staticmethod(dist.get_process_group_ranks)

    @staticmethod
    def get_coords_along_axis(base_coord: Coordinate, axis: Any, indices_at_axis: Any) -> list[Coordinate]:
        """Return the coordinates that differ from a base coordinate only along the given axis or axes."""
        places = dict(_rows(axis, indices_at_axis, base_coord))
        return list(itertools.product(*(places.get(dim, (here,)) for dim, here in enumerate(base_coord))))

    def create_group_along_axis(
        self, axis: int | Sequence[int], indices_at_axis: Any = None, backend: str | None = None
    ) -> Any:
        """Create the groups of ranks that differ only along the given axes. Collective over the world.

        Return this rank's group, or ``None`` if its index is not among ``indices_at_axis`` (all indices by default).
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
        """Return this rank's group along the given axes. The first call creates it, collectively over the world."""
        made = self._groups.get(_rows(axis, indices_at_axis, self.shape), self)  # a rank that is in no group has None
        return self.create_group_along_axis(axis, indices_at_axis, backend) if made is self else made

    def destroy_mesh_process_groups(self) -> None:
        for rows, group in self._groups.items():
            if group is not None and group is not self._existing.get(rows):
                dist.destroy_process_group(group)
        self._groups = dict(self._existing)


def _rows(axis: Any, places: Any, shape: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    axes = [axis] if isinstance(axis, int) else axis
    rows = [range(shape[dim]) for dim in axes] if places is None else [places] if isinstance(axis, int) else places
    return tuple(sorted((dim, tuple(row)) for dim, row in zip(axes, rows, strict=True)))

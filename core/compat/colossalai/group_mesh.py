"""ProcessGroupMesh: the world as a grid of ranks, with groups along its axes; the last axis varies fastest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch.distributed as dist

Axes: TypeAlias = "int | Sequence[int]"
Places: TypeAlias = "Sequence[int] | Sequence[Sequence[int]] | None"  # along an axis, or along each of several


class ProcessGroupMesh:
    """`ProcessGroupMesh(2, 2)` arranges four ranks: rank r is at (r // 2, r % 2).

    Groups are made at the first call for an axis, which is collective over the world, and kept.
    Raises ValueError where the sizes do not give the world's size.
    """

    def __init__(self, *size: int) -> None:
        if math.prod(size) != dist.get_world_size():
            raise ValueError(f"a mesh of {size} has {math.prod(size)} ranks, and the world {dist.get_world_size()}")
        self._shape = tuple(size)
        self._groups: dict[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]], dist.ProcessGroup] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self._shape

    @property
    def rank(self) -> int:
        """This process's rank in the world."""
        return dist.get_rank()

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """The size of an axis, or all sizes."""
        return self._shape if dim is None else self._shape[dim]

    def coordinate(self, dim: int | None = None) -> int | tuple[int, ...]:
        """This rank's place along an axis, or along all."""
        here = self.unravel(self.rank, self._shape)
        return here if dim is None else here[dim]

    @staticmethod
    def unravel(rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The coordinates of a rank."""
        return tuple(int(place) for place in np.unravel_index(rank, shape))

    @staticmethod
    def ravel(coord: tuple[int, ...], shape: tuple[int, ...], mode: str = "raise") -> int:
        """The rank at coordinates; mode 'wrap' or 'clip' for those outside, as NumPy's ravel_multi_index."""
        return int(np.ravel_multi_index(coord, shape, mode=mode))

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        """The world's ranks of a group."""
        return dist.get_process_group_ranks(group)

    @staticmethod
    def get_coords_along_axis(
        base_coord: tuple[int, ...], axis: Axes, indices_at_axis: Places
    ) -> list[tuple[int, ...]]:
        """The coordinates that differ from `base_coord` along the axes only, at the places given for each axis."""
        axes, places = _as_axes(axis, indices_at_axis)
        found = []
        for combination in itertools.product(*places):
            coord = list(base_coord)
            for dim, place in zip(axes, combination, strict=True):
                coord[dim] = place
            found.append(tuple(coord))
        return found

    def create_group_along_axis(
        self, axis: Axes, indices_at_axis: Places = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Make the groups of ranks that differ along the axes only; returns this rank's. Collective over the world.

        indices_at_axis: the places that belong to the groups; None for all. A rank at no such place gets None.
        """
        axes, places = _as_axes(axis, indices_at_axis, self._shape)
        bases = itertools.product(*(range(1 if dim in axes else length) for dim, length in enumerate(self._shape)))
        own = None
        for base in bases:
            members = sorted(self.ravel(c, self._shape) for c in self.get_coords_along_axis(base, axes, places))
            group = dist.new_group(members, backend=backend)
            if self.rank in members:
                own = self._groups[axes, places] = group
        return own

    def get_group_along_axis(
        self, axis: Axes, indices_at_axis: Places = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """`create_group_along_axis`, or the group that it made before."""
        kept = self._groups.get(_as_axes(axis, indices_at_axis, self._shape))
        return kept if kept is not None else self.create_group_along_axis(axis, indices_at_axis, backend)

    def destroy_mesh_process_groups(self) -> None:
        """Destroy this rank's groups that the mesh has made."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()


def _as_axes(
    axis: Axes, places: Any, shape: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Axes, ascending, and the places along each."""
    axes = [axis] if isinstance(axis, int) else axis
    rows = [range(shape[dim]) for dim in axes] if places is None else [places] if isinstance(axis, int) else places
    pairs = sorted(zip(axes, rows, strict=True), key=lambda pair: pair[0])
    return tuple(dim for dim, _ in pairs), tuple(tuple(row) for _, row in pairs)

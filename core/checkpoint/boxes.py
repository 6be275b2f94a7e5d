"""Boxes: the parts of a global tensor stored in a local tensor. Pure arithmetic, without torch or processes.

A box is a rectangle with an offset in the global tensor and an offset in the local tensor. A tensor split along some
dimensions consists of a few boxes, and so does a range of its flattened elements, the unit that a data-parallel shard
owns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Rectangle of ``size`` elements at ``local_offset`` in the local and ``global_offset`` in the global tensor."""

    global_offset: Index
    local_offset: Index
    size: Index

    @property
    def numel(self) -> int:
        """Number of elements. It is 1 for a 0-dim tensor."""
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class Split:
    """One dimension split into equal parts over ranks, of which this rank stores one.

    Attributes:
        stride: Number of sections of the dimension that are split separately (2 for SwiGLU's gate and value). A rank
            stores its part of every section.
        length: Length of the global dimension without the padding at the end of each section. None if not padded.
    """

    dim: int
    ranks: int
    rank: int
    stride: int = 1
    length: int | None = None


def split_boxes(local_shape: Sequence[int], splits: Sequence[Split]) -> tuple[Index, tuple[Box, ...]]:
    """Return the shape of the global tensor, and the boxes of a local tensor in local order.

    ``splits`` has each dimension that is not stored completely. Padding and empty boxes are left out. Raises ValueError
    if the splits contradict the shape.
    """
    shape = _full_shape(local_shape, splits)
    by_dim = {split.dim: split for split in splits}
    intervals = [
        _intervals(local, whole, by_dim.get(dim, Split(dim, 1, 0)))
        for dim, (local, whole) in enumerate(zip(local_shape, shape, strict=True))
    ]
    return shape, tuple(
        Box(tuple(part[0] for part in parts), tuple(part[1] for part in parts), tuple(part[2] for part in parts))
        for parts in itertools.product(*intervals)
    )


def _full_shape(local_shape: Sequence[int], splits: Iterable[Split]) -> Index:
    shape = list(local_shape)
    seen: set[int] = set()
    for split in splits:
        if not 0 <= split.dim < len(shape):
            raise ValueError(f"split along dimension {split.dim} of a tensor of shape {list(local_shape)}")
        if split.dim in seen:
            raise ValueError(f"dimension {split.dim} of a tensor of shape {list(local_shape)} is split twice")
        seen.add(split.dim)
        padded = local_shape[split.dim] * split.ranks
        length = padded if split.length is None else split.length
        if split.stride < 1 or local_shape[split.dim] % split.stride or length % split.stride:
            raise ValueError(
                f"dimension {split.dim}, {local_shape[split.dim]} here and {length} in all, does not divide into "
                f"{split.stride} sections (partition_stride)"
            )
        if length > padded:
            raise ValueError(
                f"dimension {split.dim} has length {length} in all and {split.ranks} ranks hold "
                f"{local_shape[split.dim]} each, {padded} together"
            )
        shape[split.dim] = length
    return tuple(shape)


def _intervals(local: int, whole: int, split: Split) -> list[tuple[int, int, int]]:
    """Return (global offset, local offset, length) of each section of a dimension that this rank stores."""
    mine, section = local // split.stride, whole // split.stride
    start, stop = min(split.rank * mine, section), min((split.rank + 1) * mine, section)
    return [(i * section + start, i * mine, stop - start) for i in range(split.stride) if stop > start]


def range_boxes(shape: Sequence[int], start: int, end: int) -> list[tuple[Index, Index]]:
    """Cover the elements [start, end) of a flattened tensor with boxes, and return their (offset, size) in flat order.

    There are at most 2 * dimensions - 1 boxes: part of the first row, complete rows, and part of the last row,
    recursively. Raises ValueError if the range is not within the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= start <= end <= numel:
        raise ValueError(f"elements [{start}, {end}) of a tensor of shape {list(shape)}, which has {numel}")
    if start == end:
        return []
    if not shape:
        return [((), ())]
    inner = tuple(shape[1:])
    row = math.prod(inner)
    low, high = -(-start // row), end // row  # complete rows
    if low > high:  # within one row
        return [
            ((high, *offset), (1, *size)) for offset, size in range_boxes(inner, start - high * row, end - high * row)
        ]
    boxes = []
    if start < low * row:
        head = range_boxes(inner, start - (low - 1) * row, row)
        boxes += [((low - 1, *offset), (1, *size)) for offset, size in head]
    if low < high:
        boxes.append(((low, *(0 for _ in inner)), (high - low, *inner)))
    if high * row < end:
        boxes += [((high, *offset), (1, *size)) for offset, size in range_boxes(inner, 0, end - high * row)]
    return boxes


def meet(box: Box, offset: Index, size: Index) -> Box | None:
    """Return the intersection of a box with a rectangle of the local tensor, or ``None`` if they do not overlap."""
    start = tuple(max(mine, theirs) for mine, theirs in zip(box.local_offset, offset, strict=True))
    stop = tuple(
        min(mine + length, theirs + width)
        for mine, length, theirs, width in zip(box.local_offset, box.size, offset, size, strict=True)
    )
    if any(high <= low for low, high in zip(start, stop, strict=True)):
        return None
    moved = tuple(
        whole + low - local for whole, local, low in zip(box.global_offset, box.local_offset, start, strict=True)
    )
    return Box(moved, start, tuple(high - low for low, high in zip(start, stop, strict=True)))


def cut_to_range(boxes: Sequence[Box], local_shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Restrict the boxes of a local tensor to its flattened elements [start, end). Padding is left out."""
    found = (meet(box, offset, size) for offset, size in range_boxes(local_shape, start, end) for box in boxes)
    return [box for box in found if box is not None]


def row_strides(shape: Sequence[int]) -> Index:
    """Return the strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)

"""Sketches: a few sums over a tensor's elements that ranks compute on their parts and add.

The random signs of an element depend only on its place in the full tensor, so any split gives the same sums. They do
not depend on the tensor's name, so recordings whose names differ can be compared. Each element of a gradient or weight
has a place, by its GlobalSlice. In an output only the columns of the last dimension have one, because data ranks,
microbatches and context parallelism distribute rows in many ways. Its sketch is a sum over rows, and does not see their
order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.checkpoint.boxes import Box, cut_to_range, row_strides
from core.checkpoint.global_slices import GlobalSlice

PROJECTIONS = 8  # the estimate of a difference's norm is right within a factor of 2 or so
ROWS_NUMBERS = 1 + 2 * PROJECTIONS  # sum of squares, projections, sums over rows of squared projections (if not split)
PART_NUMBERS = 1 + PROJECTIONS + 1  # sum of squares, projections, number of tiny elements
SAMPLED = 4096  # elements of a box among which tiny ones are counted
TINY = 1e-3  # times the root mean square of a gradient: rounding may decide the sign of such an element


class Sketch(NamedTuple):
    """Sums over one tensor or a part of it, on the tensor's device.

    Attributes:
        numbers: [ROWS_NUMBERS], [1 + PROJECTIONS] if columns are split, or [PART_NUMBERS]; fp64.
        digest: Sum of the bits, a 0-dim int64 tensor that wraps around.
        numel: Number of elements.
        width: Length of the full last dimension of an output; 0 for a part of a parameter, -1 for integers, and -2 if
            calls differ.
    """

    numbers: Tensor
    digest: Tensor
    numel: int
    width: int


@functools.lru_cache(maxsize=256)
def signs(length: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the signs of one dimension, [length, PROJECTIONS] of +1 and -1, the same on all machines and versions."""
    bits = np.random.PCG64((length, dim)).random_raw(length)[:, None] >> np.arange(PROJECTIONS, dtype=np.uint64)
    return torch.from_numpy((bits & np.uint64(1)).astype(np.float32) * 2 - 1).to(device, dtype)


@torch.no_grad()
def of_rows(tensor: Tensor, *, width: int | None = None, columns: tuple[Tensor, Tensor] | None = None) -> Sketch:
    """Sketch an output, or the gradient at one.

    Args:
        tensor: This rank's part, [..., columns].
        width: Number of columns of the full tensor; None if this rank has all of them.
        columns: Places of this rank's columns in the full tensor, and here; None for all columns.

    Returns:
        The sketch. The ranks' sketches of different rows or columns add up.
    """
    tensor = tensor.detach()
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    width = rows.shape[1] if width is None else width
    if columns is not None:
        rows = rows.index_select(1, columns[1].to(rows.device))
    wide = _wide(rows)
    sign = signs(width, 0, wide.device, wide.dtype)
    projected = wide @ (sign if columns is None else sign[columns[0].to(wide.device)])  # [rows, PROJECTIONS]
    norm = torch.linalg.vector_norm(wide, dtype=wide.dtype).double()
    numbers = [(norm * norm)[None], projected.sum(0).double()]
    if columns is None:  # squares of parts of a row do not add up to the square of the row
        numbers.append(projected.square().sum(0).double())
    return Sketch(torch.cat(numbers), _digest(rows), rows.numel(), width)


@torch.no_grad()
def of_part(flat: Tensor, first: int, place: GlobalSlice, *, counts_tiny: bool = False) -> Sketch:
    """Sketch a range of the flattened elements of a parameter, or of its gradient.

    Args:
        flat: The elements [first, first + len(flat)) of the local tensor, contiguous.
        first: Index of the first element.
        place: Position of the local tensor in the full one.
        counts_tiny: Estimate the number of elements that are smaller than TINY, and not 0.

    Returns:
        The sketch. The sketches of all parts of the full tensor add up.
    """
    flat = flat.detach()
    strides = row_strides(place.local_shape)
    numbers = torch.zeros(PART_NUMBERS, dtype=torch.float64, device=flat.device)
    digest = torch.zeros((), dtype=torch.int64, device=flat.device)
    boxes = parts_of(first, flat.numel(), place)
    for box in boxes:
        start = sum(offset * stride for offset, stride in zip(box.local_offset, strides, strict=True)) - first
        values = flat.as_strided(box.size, strides, flat.storage_offset() + start)
        wide = _wide(values)
        norm = torch.linalg.vector_norm(wide, dtype=wide.dtype)
        numbers[0] += norm.double().square()
        numbers[1:-1] += _projections(wide, place.shape, box).double()
        if counts_tiny:
            some = wide.reshape(-1)[:: max(1, box.numel // SAMPLED)]
            tiny = (some != 0) & (some.abs() <= TINY * norm / math.sqrt(box.numel))
            numbers[-1] += tiny.sum() * (box.numel / some.numel())
        digest += _digest(values)
    return Sketch(numbers, digest, sum(box.numel for box in boxes), 0)


def parts_of(first: int, numel: int, place: GlobalSlice) -> Sequence[Box]:
    """Return the boxes of the full tensor in a range of the local tensor's flattened elements."""
    if numel == math.prod(place.local_shape):
        return place.boxes
    return cut_to_range(place.boxes, place.local_shape, first, first + numel)


def _projections(values: Tensor, shape: Sequence[int], box: Box) -> Tensor:
    """Project a box by products of one sign for each dimension, [PROJECTIONS]."""
    if not values.dim():
        return values.expand(PROJECTIONS)

    def of(dim: int) -> Tensor:
        offset = box.global_offset[dim]
        return signs(shape[dim], dim, values.device, values.dtype)[offset : offset + box.size[dim]]

    found = values @ of(values.dim() - 1)
    for dim in range(values.dim() - 2, -1, -1):
        found = (found * of(dim)).sum(dim)
    return found


def of_integers(tensor: Tensor) -> Sketch:
    """Return a digest of an integer tensor, such as tokens, that is a sum over its elements."""
    mixed = tensor.detach().long() * -7046029254386353131  # odd: different values stay different
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    digest = (mixed ^ (mixed >> 32)).sum()
    return Sketch(torch.zeros(ROWS_NUMBERS, dtype=torch.float64, device=tensor.device), digest, tensor.numel(), -1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _digest(rows: Tensor) -> Tensor:
    """Sum the bits, eight bytes at a time if rows divide into them: eight times as fast."""
    rows = rows.contiguous()
    if not rows.numel():
        return torch.zeros((), dtype=torch.int64, device=rows.device)
    aligned = (
        rows.dim()
        and not rows.shape[-1] * rows.dtype.itemsize % 8
        and not rows.storage_offset() * rows.dtype.itemsize % 8
    )
    narrow = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.dtype.itemsize]
    return rows.view(torch.int64 if aligned else narrow).sum()

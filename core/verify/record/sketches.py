"""Sketches: sums over a tensor's elements, which ranks compute on their parts and add.

The random signs of an element depend only on its position in the full tensor, so every split gives the same sums. They
do not depend on the tensor's name, so recordings with other names can be compared. GlobalSlice has the position of each
element of a parameter. An output has positions for its columns only, because data ranks, microbatches and context
parallelism distribute rows in many ways. Signs by local rows are comparable if both runs distribute rows equally.
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
# Numbers of a sketch: sum of squares, projections; then for outputs sums over rows of their squared projections (0 if
# columns are split), and projections with a sign for each local row; for gradients the number of tiny elements.
LINEAR = slice(1, 1 + PROJECTIONS)
ROWS = slice(1 + PROJECTIONS, 1 + 2 * PROJECTIONS)
ORDERED = slice(1 + 2 * PROJECTIONS, 1 + 3 * PROJECTIONS)
SAMPLED = 4096  # elements of a box among which tiny ones are counted
TINY = 1e-3  # times the root mean square of a gradient: rounding may decide the sign of such an element


class Sketch(NamedTuple):
    """Sums over one tensor or a part of it, on the tensor's device.

    Attributes:
        numbers: The sums, fp64.
        digest: Sum of the bits of a weight or of integers, a 0-dim int64 tensor that wraps around; 0 for others.
        numel: Number of elements.
        width: Length of the full last dimension of an output; 0 for a part of a parameter, -1 for integers, and -2 if
            calls differ.
        rows: Number of local rows of an output.
    """

    numbers: Tensor
    digest: Tensor
    numel: int
    width: int
    rows: int = 0

    def plus(self, other: Sketch) -> Sketch:
        """Return the sketch of both parts."""
        width = self.width if self.width == other.width else -2
        numbers, digest = self.numbers + other.numbers, self.digest + other.digest
        return Sketch(numbers, digest, self.numel + other.numel, width, max(self.rows, other.rows))


@functools.lru_cache(maxsize=256)
def signs(length: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the signs of one dimension, [length, PROJECTIONS] of +1 and -1, the same on all machines and versions."""
    bits = np.random.PCG64((length, dim)).random_raw(length)[:, None] >> np.arange(PROJECTIONS, dtype=np.uint64)
    return torch.from_numpy((bits & np.uint64(1)).astype(np.float32) * 2 - 1).to(device, dtype)


@functools.lru_cache(maxsize=64)
def _row_weights(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the weights of local rows in both projections: 1, and a random sign, [2, length]."""
    sign = signs(length, 1, device, dtype)[:, 0]
    return torch.stack([torch.ones_like(sign), sign])


@torch.no_grad()
def of_rows(tensor: Tensor, *, width: int | None = None, columns: tuple[Tensor, Tensor] | None = None) -> Sketch:
    """Sketch an output, or the gradient at one. Sketches of other rows or columns add up.

    Args:
        tensor: This rank's part, [..., columns].
        width: Number of columns of the full tensor; None if this rank has all of them.
        columns: Indices of this rank's columns in the full tensor, and here; None for all columns.

    Returns:
        The sketch. It has no digest, because another pass over large tensors costs time.
    """
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    width = rows.shape[1] if width is None else width
    if columns is not None:
        rows = rows.index_select(1, columns[1].to(rows.device))
    wide = _wide(rows)
    sign = signs(width, 0, wide.device, wide.dtype)
    projected = wide @ (sign if columns is None else sign[columns[0].to(wide.device)])  # [rows, PROJECTIONS]
    plain, ordered = _row_weights(len(rows), wide.device, wide.dtype) @ projected
    squares = torch.cat([torch.linalg.vector_norm(wide)[None], torch.linalg.vector_norm(projected, dim=0)]).square()
    if columns is not None:  # squares of parts of a row do not add up to the square of the row
        squares[1:] = 0
    numbers = torch.cat([squares[:1], plain, squares[1:], ordered]).double()
    return Sketch(numbers, _no_digest(rows.device), rows.numel(), width, len(rows))


@torch.no_grad()
def of_part(flat: Tensor, first: int, place: GlobalSlice, *, is_gradient: bool = False) -> Sketch:
    """Sketch a range of the flattened elements of a parameter, or of its gradient. Sketches of all parts add up.

    Args:
        flat: The elements [first, first + len(flat)) of the local tensor, contiguous.
        first: Index of the first element.
        place: Position of the local tensor in the full one.
        is_gradient: True to estimate the number of elements that are smaller than TINY, and not 0; False for a digest.

    Returns:
        The sketch.
    """
    strides = row_strides(place.local_shape)
    numbers = torch.zeros(1 + PROJECTIONS + 1, dtype=torch.float64, device=flat.device)
    digest = _no_digest(flat.device)
    boxes = parts_of(first, flat.numel(), place)
    for box in boxes:
        start = sum(offset * stride for offset, stride in zip(box.local_offset, strides, strict=True)) - first
        values = flat.as_strided(box.size, strides, flat.storage_offset() + start)
        wide = _wide(values)
        square = torch.linalg.vector_norm(wide).square()
        tiny = square.new_zeros(())
        if is_gradient:
            some = wide.reshape(-1)[:: max(1, box.numel // SAMPLED)]
            is_tiny = (some != 0) & (some.square() <= TINY**2 / box.numel * square)
            tiny = is_tiny.sum() * (box.numel / some.numel())
        else:
            digest = digest + _digest(values)
        numbers += torch.cat([square[None], _projections(wide, place.shape, box), tiny[None]])
    return Sketch(numbers, digest, sum(box.numel for box in boxes), 0)


def parts_of(first: int, numel: int, place: GlobalSlice) -> Sequence[Box]:
    """Return the boxes of the full tensor in a range of the local tensor's flattened elements."""
    if numel == math.prod(place.local_shape):
        return place.boxes
    return cut_to_range(place.boxes, place.local_shape, first, first + numel)


def _projections(values: Tensor, shape: Sequence[int], box: Box) -> Tensor:
    """Project a box by products of one sign for each dimension, [PROJECTIONS]."""
    found = values[..., None]
    for dim in reversed(range(values.dim())):
        offset = box.global_offset[dim]
        sign = signs(shape[dim], dim, values.device, values.dtype)[offset : offset + box.size[dim]]
        found = values @ sign if dim == values.dim() - 1 else (found * sign).sum(dim)
    return found.expand(PROJECTIONS)


def of_integers(tensor: Tensor) -> Sketch:
    """Return a digest of an integer tensor, such as tokens, that is a sum over its elements."""
    mixed = tensor.detach().long() * -7046029254386353131  # odd: different values stay different
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return Sketch(tensor.new_zeros(0, dtype=torch.float64), (mixed ^ (mixed >> 32)).sum(), tensor.numel(), -1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _no_digest(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def _digest(values: Tensor) -> Tensor:
    """Sum the bits, eight bytes at a time if rows divide into them: eight times as fast."""
    values = values.contiguous()
    size = values.dtype.itemsize
    is_aligned = values.dim() and not values.shape[-1] * size % 8 and not values.storage_offset() * size % 8
    narrow = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return values.view(torch.int64 if is_aligned else narrow).sum()

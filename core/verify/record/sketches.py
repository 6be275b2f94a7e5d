"""Sketches: sums over a tensor's elements, which ranks compute on their parts and add.

The random signs of an element depend only on its position in the full tensor, so every split gives the same sums. They
do not depend on the tensor's name, so recordings with other names can be compared. GlobalSlice has the position of each
element of a parameter. An output has positions for its columns only, because data ranks, microbatches and context
parallelism distribute rows in many ways.
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
from core.verify.record.file import Entry

PROJECTIONS = 8  # the estimate of a difference's norm is right within a factor of 2 or so
# Numbers of an entry: sum of squares, projections; then for outputs whose columns are not split sums over rows of their
# squared projections; for gradients the number of tiny elements.
LINEAR = slice(1, 1 + PROJECTIONS)
ROWS = slice(1 + PROJECTIONS, 1 + 2 * PROJECTIONS)
SAMPLED = 4096  # elements of a box among which tiny ones are counted
TINY = 1e-3  # times the root mean square of a gradient: rounding may decide the sign of such an element


class Sketch(NamedTuple):
    """Sums over one tensor or a part of it. ``entries_of`` computes their numbers for many sketches at a time.

    Attributes:
        pieces: The sums on the tensor's device; norms instead of sums of squares.
        numel: Number of elements.
        width: Length of the full last dimension of an output; 0 for a part of a parameter, -1 for integers.
        digest: Sum of the bits of a weight or of integers, a 0-dim int64 tensor that wraps around.
        factor: Factor that a gradient still lacks.
    """

    pieces: tuple[Tensor, ...]
    numel: int
    width: int
    digest: Tensor | None = None
    factor: float = 1.0


def entries_of(sketches: Sequence[Sketch]) -> list[Entry]:
    """Return the entries of sketches, with few operations and one transfer from the device for all of them."""
    pieces = [piece.reshape(-1) for sketch in sketches for piece in sketch.pieces]
    numbers = torch.cat(pieces).tolist() if pieces else []
    digests = [sketch.digest for sketch in sketches if sketch.digest is not None]
    bits = iter(torch.stack(digests).tolist() if digests else ())
    entries, start = [], 0
    for sketch in sketches:
        end = start + sum(piece.numel() for piece in sketch.pieces)
        mine = numbers[start:end]
        mine[: LINEAR.stop] = [number * sketch.factor for number in mine[: LINEAR.stop]]
        mine[:1] = [number * number for number in mine[:1]]
        if sketch.width > 0:
            mine[ROWS] = [number * number for number in mine[ROWS]]
        digest = 0 if sketch.digest is None else next(bits)
        entries.append(Entry(sketch.numel, sketch.width, digest, tuple(mine)))
        start = end
    return entries


@functools.lru_cache(maxsize=256)
def signs(length: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the signs of one dimension, [length, PROJECTIONS] of +1 and -1, the same on all machines and versions."""
    bits = np.random.PCG64((length, dim)).random_raw(length)[:, None] >> np.arange(PROJECTIONS, dtype=np.uint64)
    return torch.from_numpy((bits & np.uint64(1)).astype(np.float32) * 2 - 1).to(device, dtype)


@torch.no_grad()
def of_rows(tensor: Tensor, *, width: int | None = None, columns: tuple[Tensor, Tensor] | None = None) -> Sketch:
    """Sketch an output, or the gradient at one. Sketches of other rows or columns add up.

    ``columns`` are the indices of this rank's columns in the full tensor, of ``width`` columns, and here. There is no
    digest, because another pass over large tensors costs time.
    """
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    width = rows.shape[1] if width is None else width
    if columns is not None:
        rows = rows.index_select(1, columns[1].to(rows.device))
    wide = _wide(rows)
    sign = signs(width, 0, wide.device, wide.dtype)
    projected = wide @ (sign if columns is None else sign[columns[0].to(wide.device)])  # [rows, PROJECTIONS]
    pieces = [torch.linalg.vector_norm(wide), projected.sum(0)]
    if columns is None:  # squares of parts of a row do not add up to the square of the row
        pieces.append(torch.linalg.vector_norm(projected, dim=0))
    return Sketch(tuple(pieces), rows.numel(), width)


@torch.no_grad()
def of_part(
    flat: Tensor, first: int, place: GlobalSlice, *, is_gradient: bool = False, factor: float = 1.0
) -> list[Sketch]:
    """Sketch the elements [first, first + len(flat)) of a flattened parameter, or of its gradient, by boxes.

    Sketches of all parts add up. For a gradient, the elements smaller than TINY that are not 0 are counted; ``factor``
    is the factor that it still lacks. Other tensors get a digest.
    """
    strides = row_strides(place.local_shape)
    found = []
    for box in parts_of(first, flat.numel(), place):
        start = sum(offset * stride for offset, stride in zip(box.local_offset, strides, strict=True)) - first
        values = flat.as_strided(box.size, strides, flat.storage_offset() + start)
        wide = _wide(values)
        norm = torch.linalg.vector_norm(wide)
        pieces = [norm, _projections(wide, place.shape, box)]
        if is_gradient:
            some = wide.reshape(-1)[:: max(1, box.numel // SAMPLED)].abs()
            tiny = (some <= norm * (TINY / math.sqrt(box.numel))).sum() - (some == 0).sum()
            pieces.append(tiny * (box.numel / some.numel()))
        found.append(Sketch(tuple(pieces), box.numel, 0, None if is_gradient else _digest(values), factor))
    return found


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
    return Sketch((), tensor.numel(), -1, digest=(mixed ^ (mixed >> 32)).sum())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _digest(values: Tensor) -> Tensor:
    """Sum the bits, eight bytes at a time if rows divide into them: eight times as fast."""
    values = values.contiguous()
    size = values.dtype.itemsize
    is_aligned = values.dim() and not values.shape[-1] * size % 8 and not values.storage_offset() * size % 8
    narrow = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return values.view(torch.int64 if is_aligned else narrow).sum()

"""Views of a flat tensor, one for each parameter that lies in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from core.distributed.param_layout import Slot


def views_of(flat: torch.Tensor, slots: Sequence[Slot], start: int) -> list[torch.Tensor]:
    """For each slot its elements of `flat` in the parameter's shape; `flat` begins at element `start` of the buffer.

    One torch call a view: a slice that is then reshaped takes three times as long, and a model has many.
    """
    first = flat.storage_offset() - start
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    views = []
    for _, shape, begin, _, _ in slots:
        stride = strides.get(shape)
        if stride is None:
            stride = strides[shape] = row_strides(shape)
        views.append(flat.as_strided(shape, stride, first + begin))
    return views


def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that torch gives a contiguous tensor of this shape."""
    return tuple(math.prod(max(length, 1) for length in shape[dim + 1 :]) for dim in range(len(shape)))

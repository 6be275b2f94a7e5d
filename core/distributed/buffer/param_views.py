"""Views of a flat tensor: of each parameter that lies in it, or of stretches of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from core.distributed.layout.param_layout import Slot

PACK_NUMEL = 2**20  # elements of small parameters that are copied together


def views_of(flat: torch.Tensor, slots: Sequence[Slot], start: int) -> list[torch.Tensor]:
    """For each slot its elements of `flat` in the parameter's shape; `flat` begins at element `start` of the buffer.

    One torch call a view: a slice that is then reshaped takes three times as long, and a model has many.
    """
    first = flat.storage_offset() - start
    strides = _RowStrides()
    return [flat.as_strided(shape, strides[shape], first + begin) for _, shape, begin, _, _ in slots]


@torch.inference_mode()
def homes_of(flat: torch.Tensor, slots: Sequence[Slot], start: int) -> list[torch.Tensor]:
    """The same views, as homes for `move_to` and nothing else: autograd keeps no account of what is done to them."""
    return views_of(flat, slots, start)


@torch.inference_mode()
def move_to(homes: Sequence[torch.Tensor], params: Sequence[nn.Parameter]) -> None:
    """Make every parameter a view of its home, with the values that it has; what it lay in before is freed.

    Small ones are copied together; of a large model PACK_NUMEL elements, or one parameter, are there twice at a time.
    """
    filled = first = 0
    for index, param in enumerate(params):
        filled += param.numel()
        if filled >= PACK_NUMEL or index == len(params) - 1:
            here, there = params[first : index + 1], homes[first : index + 1]
            torch._foreach_copy_(there, here)
            for moved, home in zip(here, there, strict=True):
                moved.data = home
            filled, first = 0, index + 1


def pieces_of(flat: torch.Tensor, ranges: Iterable[tuple[int, int]]) -> list[torch.Tensor]:
    """[flat[start:end] for start, end in ranges]: ranges come in order and do not overlap.

    One torch call for all: a slice takes three times as long, and a model of many small parameters has many.
    """
    sizes: list[int] = []
    wanted: list[int] = []  # which of the sizes are no gaps
    at = 0
    for start, end in ranges:
        if start > at:
            sizes.append(start - at)
        wanted.append(len(sizes))
        sizes.append(end - start)
        at = end
    if at < flat.numel():
        sizes.append(flat.numel() - at)
    pieces = flat.split_with_sizes(sizes)
    return [pieces[index] for index in wanted]


class _RowStrides(dict[tuple[int, ...], tuple[int, ...]]):
    """Strides of a shape, worked out once for each: a model has many parameters of few shapes."""

    def __missing__(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        strides = self[shape] = row_strides(shape)
        return strides


def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that torch gives a contiguous tensor of this shape."""
    return tuple(math.prod(max(length, 1) for length in shape[dim + 1 :]) for dim in range(len(shape)))

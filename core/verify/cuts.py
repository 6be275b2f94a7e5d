"""Find which part of a full activation a rank holds, from the two shapes. Pure functions.

A dimension that is shorter on a rank is cut over context parallelism, tensor parallelism, or both. A cut takes equal
chunks, or one chunk of each of n sections: gate and value (2), queries, keys, and values (3), or the samples of a batch
that is flattened with its sequence. Context parallelism may also take one chunk of the head and one of the tail.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core.checkpoint.global_slices import AxisRanks, GlobalSlice

AXES = ("cp", "tp")
SECTIONS = (1, 2, 3)


@dataclass(frozen=True)
class Cut:
    """Indices of a rank's tensor in the full tensor.

    Attributes:
        places: For each dimension, the indices in the full tensor, in the rank's order; None for all.
        here: Indices in the rank's last dimension, if that ends in padding.
        turned: True if samples and positions are in the other order.
    """

    places: tuple[Tensor | None, ...]
    here: Tensor | None = None
    turned: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """Return the rank's part of the full tensor."""
        whole = whole.transpose(0, 1) if self.turned else whole
        for dim, places in enumerate(self.places):
            whole = whole if places is None else whole.index_select(dim, places)
        return whole

    def without_padding(self, mine: Tensor) -> Tensor:
        """Return the elements of a rank's tensor that are in the full tensor."""
        return mine if self.here is None else mine.index_select(mine.dim() - 1, self.here)


def cuts_of(
    mine: Sequence[int], whole: Sequence[int], ranks: AxisRanks, *, samples: int, weight: GlobalSlice | None = None
) -> list[Cut]:
    """Return all cuts by which a tensor of shape ``mine`` can come from a tensor of shape ``whole``; empty if
    impossible.

    Args:
        mine: Shape on this rank.
        whole: Shape in the reference.
        ranks: Sizes and ranks of the groups.
        samples: Number of samples in the microbatch.
        weight: Slice of the module's weight on this rank; a column-parallel layer's output is cut like its weight's
            rows.
    """
    if len(mine) != len(whole):
        return []
    found = _cuts(mine, whole, ranks, samples, weight)
    if len(whole) > 2:
        other = _cuts(mine, (whole[1], whole[0], *whole[2:]), ranks, samples, weight)
        found += [replace(cut, turned=True) for cut in other]
    return found


def _cuts(
    mine: Sequence[int], whole: Sequence[int], ranks: AxisRanks, samples: int, weight: GlobalSlice | None
) -> list[Cut]:
    found = []
    axes = [axis for axis in AXES if ranks.size(axis) > 1]
    ways: list[list[Tensor | None]] = []
    for here, there in zip(mine, whole, strict=True):
        ways.append([None] if here == there else list(_ways(there, here, axes, ranks, samples)))
    if mine and weight is not None and weight.shape[0] == whole[-1] and weight.local_shape[0] == mine[-1] != whole[-1]:
        there, here = rows_of(weight)
        found = [Cut((*first, there), here) for first in itertools.product(*ways[:-1])]
    if mine and mine[-1] < whole[-1] < mine[-1] * ranks.size("tp"):  # a vocabulary is padded at the last rank's end
        first = mine[-1] * ranks.rank("tp")
        there = torch.arange(first, max(first, min(first + mine[-1], whole[-1])))
        found += [Cut((*head, there), torch.arange(len(there))) for head in itertools.product(*ways[:-1])]
    return found + [Cut(places) for places in itertools.product(*ways)]


def rows_of(weight: GlobalSlice) -> tuple[Tensor, Tensor]:
    """Return the indices of a split weight's rows in the full weight, and here: its module's output columns."""
    none = torch.arange(0)
    rows = [(box.global_offset[0], box.local_offset[0], box.size[0]) for box in weight.boxes]
    there = [torch.arange(start, start + size) for start, _, size in rows]
    here = [torch.arange(start, start + size) for _, start, size in rows]
    return torch.cat([none, *there]), torch.cat([none, *here])


def _ways(length: int, part: int, axes: Sequence[str], ranks: AxisRanks, samples: int) -> Iterator[Tensor]:
    """Yield the different index vectors [part] to which a dimension of ``length`` may be cut."""
    seen = set()
    for count in range(1, len(axes) + 1):
        for chain in itertools.permutations(axes, count):
            if part * math.prod(ranks.size(axis) for axis in chain) != length:
                continue
            for sections in itertools.product((*SECTIONS, samples), repeat=count):
                for ends in itertools.product((True, False), repeat=count):
                    places: Tensor | None = torch.arange(length)
                    for axis, number, both_ends in zip(chain, sections, ends, strict=True):
                        if places is not None:
                            places = _taken(
                                places, number, ranks.size(axis), ranks.rank(axis), both_ends and axis == "cp"
                            )
                    if places is not None and (key := tuple(places.tolist())) not in seen:
                        seen.add(key)
                        yield places


def _taken(places: Tensor, sections: int, size: int, rank: int, both_ends: bool) -> Tensor | None:
    """Take one of ``size`` chunks of each section, or one chunk of its head and one of its tail."""
    chunks = sections * size * (2 if both_ends else 1)
    if sections < 1 or len(places) % chunks:
        return None
    rows = places.view(sections, chunks // sections, -1)
    chosen = rows[:, [rank, 2 * size - 1 - rank]] if both_ends else rows[:, rank]
    return chosen.reshape(-1)

"""Shards: the parts of parameters in a bucket's owned range, and adjacent shards that are stepped as one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.layout.param_layout import BucketLayout

VECTOR_NUMEL = 16  # fp32 elements in the longest CPU vector
NORM_GROUP = "grad_norm_group"  # attribute of parameters whose gradients have a separate norm


class ParamShard(NamedTuple):
    """Elements [start, end) of the bucket's owned range, which are a flattened parameter's elements from ``offset`` on.

    This is a tuple, because there is one per parameter and a frozen dataclass takes four times as long to create.
    """

    param: nn.Parameter
    contract: GradientContract
    group: int
    start: int
    end: int
    offset: int
    norm_group: str | None = None

    @property
    def numel(self) -> int:
        """Number of the parameter's elements that this rank owns here."""
        return self.end - self.start

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter if this rank owns all of it; otherwise [numel]."""
        return tuple(self.param.shape) if self.numel == self.param.numel() else (self.numel,)

    @property
    def data(self) -> torch.Tensor:
        """Owned part of the parameter. A fully owned parameter is returned unsliced, because it may not be
        contiguous.
        """
        if self.numel == self.param.numel():
            return self.param.data
        return self.param.data.view(-1)[self.offset : self.offset + self.numel]

    def cut(self, start: int, end: int) -> ParamShard:
        low, high = max(self.start, start), min(self.end, end)
        return self._replace(start=low, end=high, offset=self.offset + low - self.start)


def owned_shards(
    layout: BucketLayout,
    owned: tuple[int, int],
    params: Sequence[nn.Parameter],
    contracts: Sequence[GradientContract],
    group_of: Callable[[nn.Parameter], int],
) -> list[ParamShard]:
    """Return the parts of a bucket's parameters within its owned range [start, end), without empty parts.

    ``params`` and ``contracts`` are in the order of the layout's slots.
    """
    low, high = owned
    shards = []
    for slot, param, contract in zip(layout.slots, params, contracts, strict=True):
        begin = slot.start - layout.start
        start, end = max(begin, low), min(slot.end - layout.start, high)
        if start < end:
            norm_group = getattr(param, NORM_GROUP, None)
            shards.append(
                ParamShard(param, contract, group_of(param), start - low, end - low, start - begin, norm_group)
            )
    return shards


def join_shards(
    shards: Sequence[ParamShard], alone: Callable[[int], bool] = lambda group: False
) -> list[list[ParamShard]]:
    """Group adjacent shards of one param group and norm, so that they are stepped as one tensor.

    Shards are joined only if all but the last fill complete vectors. Otherwise kernels round the last elements of a
    tensor differently, and splitting a segment later (for a frozen parameter) must not change a bit. Gradients of the
    padding between shards have no effect. ``alone`` returns ``True`` for a param group whose shards must stay separate.
    """
    joined: list[list[ParamShard]] = []
    for shard in shards:
        first = joined[-1][0] if joined else shard
        joins = (shard.group, shard.norm_group) == (first.group, first.norm_group) and not alone(shard.group)
        if joined and joins and (shard.start - first.start) % VECTOR_NUMEL == 0:
            joined[-1].append(shard)
        else:
            joined.append([shard])
    return joined


def cut_shards(shards: Sequence[ParamShard], numel: int) -> list[tuple[list[ParamShard], int]]:
    """Cut adjacent shards into (shards, end) pieces of ``numel`` elements, with a shorter last piece.

    A piece may end in padding, so that it fills complete vectors (see ``join_shards``).
    """
    cuts = []
    for start in range(shards[0].start, shards[-1].end, numel):
        end = min(start + numel, shards[-1].end)
        first = bisect_right(shards, start, key=lambda shard: shard.end)
        behind = bisect_left(shards, end, key=lambda shard: shard.start)
        if first < behind:
            cuts.append(([shard.cut(start, end) for shard in shards[first:behind]], end))
    return cuts

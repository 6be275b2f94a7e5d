"""A bucket's owned range, cut into shards of parameters; and neighbours that are stepped as one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.layout.param_layout import BucketLayout

VECTOR_NUMEL = 16  # elements of the longest vector of a CPU, in fp32
NORM_GROUP = "grad_norm_group"  # the attribute of parameters whose gradients have a norm of their own


class ParamShard(NamedTuple):
    """Elements [start, end) of the bucket's owned range: those from `offset` on of one flattened parameter.

    A tuple, because there is one for each parameter and a frozen dataclass takes four times as long to make.
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
        """Elements of the parameter that this rank owns here."""
        return self.end - self.start

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape where all of it is owned; else [numel]."""
        return tuple(self.param.shape) if self.numel == self.param.numel() else (self.numel,)

    @property
    def data(self) -> torch.Tensor:
        """The owned part of the parameter: itself where all of it is owned, for it may not be contiguous."""
        if self.numel == self.param.numel():
            return self.param.data
        return self.param.data.view(-1)[self.offset : self.offset + self.numel]

    def cut(self, start: int, end: int) -> ParamShard:
        """The part of it in [start, end) of the owned range."""
        low, high = max(self.start, start), min(self.end, end)
        return self._replace(start=low, end=high, offset=self.offset + low - self.start)


def owned_shards(
    layout: BucketLayout,
    owned: tuple[int, int],
    params: Sequence[nn.Parameter],
    contracts: Sequence[GradientContract],
    group_of: Callable[[nn.Parameter], int],
) -> list[ParamShard]:
    """The parts of a bucket's parameters that lie in `owned`, [start, end) of it; empty ones are left out.

    params, contracts: in the order of the layout's slots.
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
    """Neighbours of one param group and norm together. The padding between them has no gradient that matters.

    They are joined only where all before the last fill whole vectors. Kernels round the last elements of a tensor in
    another way where they do not, and a segment that is split later (a frozen parameter) shall not change a bit.
    alone: True for a param group of which each shard is a segment of its own.
    """
    joined: list[list[ParamShard]] = []
    for shard in shards:
        first = joined[-1][0] if joined else shard
        alike = (shard.group, shard.norm_group) == (first.group, first.norm_group) and not alone(shard.group)
        if joined and alike and (shard.start - first.start) % VECTOR_NUMEL == 0:
            joined[-1].append(shard)
        else:
            joined.append([shard])
    return joined


def cut_shards(shards: Sequence[ParamShard], numel: int) -> list[tuple[list[ParamShard], int]]:
    """Cut neighbours into (shards, end) of `numel` elements and a shorter last one.

    Each ends where it was cut, in padding perhaps, so that it fills whole vectors (see join_shards).
    """
    cuts = []
    for start in range(shards[0].start, shards[-1].end, numel):
        end = min(start + numel, shards[-1].end)
        first = bisect_right(shards, start, key=lambda shard: shard.end)
        behind = bisect_left(shards, end, key=lambda shard: shard.start)
        if first < behind:
            cuts.append(([shard.cut(start, end) for shard in shards[first:behind]], end))
    return cuts

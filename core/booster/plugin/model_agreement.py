"""Do all ranks hold one model? Asked before any of them cuts its shards."""

from __future__ import annotations

import warnings
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn


class Described(NamedTuple):
    """A parameter as ranks compare it. total: the sum of its elements; None on the meta device."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    total: float | None

    def __str__(self) -> str:
        return f"{self.name!r} {list(self.shape)} {self.dtype}"


def agree_on_model(model: nn.Module, group: dist.ProcessGroup, plugin: str, *, warn_of_values: bool) -> None:
    """Raise ValueError on every rank of a group where names, shapes or dtypes differ. Collective.

    warn_of_values: warn where values differ: shards cut from different models make a model that nobody has made.
    """
    mine = [
        Described(name, tuple(param.shape), str(param.dtype), _total(param)) for name, param in model.named_parameters()
    ]
    everyones: list[list[Described]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    first, *others = everyones
    first_rank, *ranks = dist.get_process_group_ranks(group)
    for rank, theirs in zip(ranks, others, strict=True):
        for here, there in zip_longest(first, theirs):
            if here is None or there is None or here[:3] != there[:3]:
                raise ValueError(
                    f"{plugin}: rank {first_rank} has {here or 'no more parameters'} where rank {rank} has "
                    f"{there or 'no more parameters'}; all ranks must build the same model"
                )
    for rank, theirs in zip(ranks, others, strict=True):
        unlike = [here.name for here, there in zip(first, theirs, strict=True) if here.total != there.total]
        if unlike and warn_of_values:
            warnings.warn(
                f"{plugin}: {len(unlike)} parameters, the first {unlike[0]!r}, have other values on rank {rank} than "
                f"on rank {first_rank}, so the sharded model will be pieces of both; seed all ranks alike, or set "
                "sync_module_states=True",
                stacklevel=4,
            )
            return


def _total(param: torch.Tensor) -> float | None:
    return None if param.is_meta else float(param.detach().sum(dtype=torch.float64))

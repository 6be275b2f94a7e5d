"""This rank's slice of a whole tensor, and whole tensors from slices: over tensor parallelism, and over experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from core.hugging_face.plan import Split
from core.process_groups import ProcessGroups
from core.tensor_parallel.initialization import tensor_parallel_join, tensor_parallel_slice


def slice_of(whole: Tensor, split: Split | None, groups: ProcessGroups) -> Tensor:
    """This rank's slice of a whole parameter, or of what has its shape. A view where it can be one."""
    for axis, dim, blocks in () if split is None else split.cuts:
        if groups.size(axis) > 1:
            whole = tensor_parallel_slice(whole, dim, groups.size(axis), groups.rank(axis), blocks)
    return whole


def whole_of(part: Tensor, split: Split | None, groups: ProcessGroups) -> Tensor:
    """A whole parameter, or what has its shape, from all slices. Collective over the groups that it is cut over."""
    for axis, dim, blocks in () if split is None else split.cuts:
        if groups.size(axis) > 1:
            parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(groups.size(axis))]
            dist.all_gather(parts, part.contiguous(), group=groups.require(axis))
            part = _joined(parts, split, dim, blocks)
    return part


def whole_on_first(part: Tensor, split: Split | None, groups: ProcessGroups) -> Tensor:
    """`whole_of` on the first rank of the groups; other ranks get something else, and need no memory for it."""
    for axis, dim, blocks in () if split is None else split.cuts:
        if groups.size(axis) > 1:
            first = groups.rank(axis) == 0
            parts = [torch.empty_like(part) for _ in range(groups.size(axis))] if first else None
            dist.gather(part.contiguous(), parts, group=groups.require(axis), group_dst=0)
            if parts is None:
                return part
            part = _joined(parts, split, dim, blocks)
    return part


def _joined(parts: list[Tensor], split: Split | None, dim: int, blocks: int) -> Tensor:
    """Without the padding at the end of a vocabulary."""
    assert split is not None, "what is not cut is not joined"
    return tensor_parallel_join(parts, dim, blocks).narrow(dim, 0, split.shape[dim]).contiguous()

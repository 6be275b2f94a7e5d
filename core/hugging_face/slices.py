"""This rank's slice of a whole tensor, and whole tensors from slices: over tensor parallelism, and over experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from core.groups.process_groups import ProcessGroups
from core.hugging_face.plan import Split
from core.tensor_parallel.initialization import tensor_parallel_join, tensor_parallel_slice
from core.watch.waiting import waiting


def slice_of(whole: Tensor, split: Split | None, groups: ProcessGroups) -> Tensor:
    """This rank's slice of a whole parameter, or of what has its shape. A view where it can be one."""
    for axis, dim, blocks, multiple in () if split is None else split.cuts:
        if groups.size(axis) > 1:
            whole = tensor_parallel_slice(whole, dim, groups.size(axis), groups.rank(axis), blocks, multiple)
    return whole


def whole_of(part: Tensor, split: Split | None, groups: ProcessGroups, *, on_first: bool = False) -> Tensor:
    """A whole parameter, or what has its shape, from all slices. Collective over the groups that it is cut over.

    on_first: True if only the first rank of the groups needs it; others get something else, and need no memory for it.
    """
    for axis, dim, blocks, _ in () if split is None else split.cuts:
        if groups.size(axis) == 1:
            continue
        part, group = part.contiguous(), groups.require(axis)
        needed = groups.rank(axis) == 0 or not on_first
        parts = [torch.empty_like(part) for _ in range(groups.size(axis))] if needed else None
        with waiting("the slices of a parameter", group):
            if parts is None or on_first:
                dist.gather(part, parts, group=group, group_dst=0)
            else:
                dist.all_gather(parts, part, group=group)
        if parts is None:
            return part
        assert split is not None, "what is not cut is not joined"
        part = tensor_parallel_join(parts, dim, blocks)
        part = part.narrow(dim, 0, split.shape[dim]).contiguous()  # without the padding at the end of a vocabulary
    return part

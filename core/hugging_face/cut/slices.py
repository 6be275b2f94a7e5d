"""Conversion between full tensors and this rank's slices, over tensor and expert parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from core.groups.process_groups import ProcessGroups
from core.hugging_face.read.plan import Split
from core.tensor_parallel.initialization import tensor_parallel_join, tensor_parallel_slice
from core.watch.waiting import waiting


def slice_of(whole: Tensor, split: Split | None, groups: ProcessGroups) -> Tensor:
    """Return this rank's slice of a full tensor, or the tensor itself without a split. A view if possible."""
    for axis, dim, blocks, multiple in () if split is None else split.cuts:
        size = groups.size(axis)
        if size > 1:
            whole = tensor_parallel_slice(whole, dim, size, groups.rank(axis), blocks, multiple)
    return whole


def whole_of(part: Tensor, split: Split | None, groups: ProcessGroups, *, on_first: bool = False) -> Tensor:
    """Gather a full tensor from all slices. Collective over the groups that cut it.

    With ``on_first`` only the first rank of the groups gets the result. Other ranks then allocate no memory for it, and
    their result is undefined.
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
        part = part.narrow(dim, 0, split.shape[dim]).contiguous()  # drops a vocabulary's padding
    return part

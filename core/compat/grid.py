"""The ranks of a grid, and the groups that span some of its axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist


def groups_along(shape: Sequence[int], axes: Iterable[int]) -> list[list[int]]:
    """The ranks of every group that spans `axes`, where the last axis of the grid varies fastest."""
    inside = sorted(axes)
    outside = [axis for axis in range(len(shape)) if axis not in inside]
    ranks = np.arange(math.prod(shape)).reshape(shape).transpose(*outside, *inside)
    return ranks.reshape(-1, math.prod(shape[axis] for axis in inside)).tolist()


def new_groups(members: Iterable[Sequence[int]], **options: Any) -> Any:
    """Make a process group of each; this rank's, or None. Collective over the world."""
    mine = None
    for ranks in members:
        group = dist.new_group(list(ranks), **options)
        mine = group if dist.get_rank() in ranks else mine
    return mine

"""Exchange of token rows between ranks with uneven counts, in one collective whose backward is its reverse.

Every rank of the group calls each function, even without rows. Autograd then runs the same collectives in the same
order on all ranks in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    group_rank,
    group_size,
    reduce_scatter_to_sequence_parallel_region,
)
from core.watch.waiting import waiting


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows: ``send[i]`` rows to rank i, ``receive[i]`` rows from it. Backward reverses it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        with waiting("the rows of experts", group):
            dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def all_to_all_rows(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Exchange rows between the ranks of a group. Collective over the group.

    ``rows`` are sorted by destination rank, [sum(send), ...], and the result by source rank, [sum(receive), ...].
    ``receive[i]`` must equal rank i's ``send`` entry for this rank.
    """
    if group is None or group_size(group) == 1:
        return rows
    received: Tensor = _AllToAll.apply(rows, tuple(send), tuple(receive), group)
    return received


def gather_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """All-gather rows. Backward sums the ranks' gradients, because each rank uses the rows differently. Collective.

    ``rows`` has shape [counts[rank], ...], and the result [sum(counts), ...] in rank order.
    """
    size = group_size(group)
    if group is None or size == 1 or not any(counts):
        return rows
    if len(set(counts)) == 1:
        return gather_from_sequence_parallel_region(rows, group=group)
    return all_to_all_rows(rows.repeat(size, *[1] * (rows.dim() - 1)), [rows.shape[0]] * size, counts, group)


def reduce_scatter_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Sum rows [sum(counts), ...] over the ranks and return this rank's [counts[rank], ...]. Collective.

    This is the dual of ``gather_rows``.
    """
    size = group_size(group)
    if group is None or size == 1 or not any(counts):
        return rows
    if len(set(counts)) == 1:
        return reduce_scatter_to_sequence_parallel_region(rows, group)
    mine = counts[group_rank(group)]
    parts = all_to_all_rows(rows, counts, [mine] * size, group)
    return parts.view(size, mine, *rows.shape[1:]).sum(dim=0)

"""Rows of tokens between ranks, any number of them from each: one collective, whose backward is itself turned round.

Every rank of the group calls each function, also one that has no rows: in backward autograd then runs the same
collectives in the same order everywhere.
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
    """`send[i]` rows to rank i, `receive[i]` rows from it; gradients go back the way the rows came."""

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
    """Rows [sum(send), ...], sorted by where they go, for rows [sum(receive), ...], sorted by where they are from.

    send, receive: rows to and from each rank of the group; a rank's `receive[i]` is `send` of rank i for it.
    """
    if group is None or group_size(group) == 1:
        return rows
    received: Tensor = _AllToAll.apply(rows, tuple(send), tuple(receive), group)
    return received


def gather_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' rows, `counts[i]` from rank i. Each rank uses them its own way: in backward the gradients add up."""
    size = group_size(group)
    if group is None or size == 1 or not any(counts):
        return rows
    if len(set(counts)) == 1:
        return gather_from_sequence_parallel_region(rows, group=group)
    return all_to_all_rows(rows.repeat(size, *[1] * (rows.dim() - 1)), [rows.shape[0]] * size, counts, group)


def reduce_scatter_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """This rank's `counts[rank]` rows of the sum over ranks of [sum(counts), ...]; the dual of `gather_rows`."""
    size = group_size(group)
    if group is None or size == 1 or not any(counts):
        return rows
    if len(set(counts)) == 1:
        return reduce_scatter_to_sequence_parallel_region(rows, group)
    mine = counts[group_rank(group)]
    parts = all_to_all_rows(rows, counts, [mine] * size, group)
    return parts.view(size, mine, *rows.shape[1:]).sum(dim=0)

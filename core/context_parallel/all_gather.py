"""All ranks' keys and values on every rank: one all-gather a layer forward, one reduce-scatter backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.context_parallel.blocks import Accumulator, Block, accumulate_dtype, add_gradients
from core.context_parallel.sequence_split import join_sequence, split_sequence
from core.tensor_parallel.mappings import gather_from_sequence_parallel_region


def all_gather_attention(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, documents: Tensor | None
) -> Tensor:
    """[s / cp, b, heads or groups, d] -> [s / cp, b, heads, d]. Collective over the group, forward and backward."""
    size, rank = group.size(), group.rank()
    both = gather_from_sequence_parallel_region(torch.stack([key, value], dim=1), group=group)
    key, value = join_sequence(both, 0, size).unbind(dim=1)
    query, key, value = (rearrange(part, "s b n d -> b n s d") for part in (query, key, value))
    mine = None if documents is None else split_sequence(documents, 1, size, rank)
    output = _BlockAttention.apply(query, key, value, mine, documents, whole_key_blocks(query.shape[2], size, rank))
    return rearrange(output, "b n s d -> s b n d")


def whole_key_blocks(length: int, size: int, rank: int) -> list[Block]:
    """The blocks of a rank's `length` queries and all `length * size` keys: its two chunks, each with what precedes."""
    chunk = length // 2
    blocks, before = [], []
    for place, number in enumerate((rank, 2 * size - 1 - rank)):
        queries = slice(place * chunk, (place + 1) * chunk)
        blocks.append(Block(queries, slice(number * chunk, (number + 1) * chunk), causal=True))
        if number:
            before.append(Block(queries, slice(0, number * chunk)))
    return blocks + before


class _BlockAttention(torch.autograd.Function):
    """Attention as a sum of blocks: no mask of all queries by all keys, and none of it kept for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_documents: Tensor | None,
        key_documents: Tensor | None,
        blocks: Sequence[Block],
    ) -> Tensor:
        total = Accumulator(query)
        for block in blocks:
            total.attend(block, query, key, value, query_documents, key_documents)
        result = total.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, total.lse, query_documents, key_documents)
        ctx.blocks = blocks
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, lse, query_documents, key_documents = ctx.saved_tensors
        dtype = accumulate_dtype(query.dtype)
        grads = tuple(torch.zeros(part.shape, dtype=dtype, device=part.device) for part in (query, key, value))
        for block in ctx.blocks:
            add_gradients(grads, block, grad, query, key, value, result, lse, query_documents, key_documents)
        return *(part.to(query.dtype) for part in grads), None, None, None

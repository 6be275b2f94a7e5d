"""Keys and values travel around a ring; each rank adds the blocks it sees with an online softmax.

Ring attention (arXiv 2310.01889) with head-tail chunks. Of a block that a rank receives it computes one half, whoever
sent it: an earlier rank's head chunk is before all queries here and its tail after them; a later rank's chunks lie both
between this rank's head and tail. So all ranks work equally long in every step, and no block needs a causal mask but
the rank's own. While a block is computed the next one is under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.context_parallel.blocks import (
    Accumulator,
    Block,
    accumulate_dtype,
    block_backward,
    block_forward,
    visible_pairs,
)
from core.context_parallel.sequence_split import split_sequence


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, documents: Tensor | None
) -> Tensor:
    """[s / cp, b, heads or groups, d] -> [s / cp, b, heads, d]. Collective over the group, forward and backward."""
    query, key, value = (rearrange(part, "s b n d -> b n s d") for part in (query, key, value))
    output: Tensor = _RingAttention.apply(query, key, value, documents, group)
    return rearrange(output, "b n s d -> s b n d")


def ring_block(length: int, rank: int, source: int) -> Block:
    """What `rank` computes of the keys of `source`; both hold `length` positions, their head chunk first."""
    everything, half = slice(0, length), length // 2
    if source == rank:
        return Block(everything, everything, causal=True)
    if source < rank:
        return Block(everything, slice(0, half))
    return Block(slice(half, length), everything)


class _RingAttention(torch.autograd.Function):
    """Forward: keys and values pass by. Backward: they pass by again, and their gradients travel with them, home."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, group: dist.ProcessGroup
    ) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        total = Accumulator(query)
        passing = torch.stack([key, value])
        for step in range(size):
            incoming = _pass_on(passing, group) if step < size - 1 else None
            source = (rank - step) % size  # its own block first: there every query sees a key, itself
            block = ring_block(query.shape[2], rank, source)
            output, lse = block_forward(
                query[:, :, block.queries],
                passing[0][:, :, block.keys],
                passing[1][:, :, block.keys],
                causal=block.causal,
                visible=_visible(block, documents, size, rank, source),
            )
            total.add(block.queries, output, lse)
            if incoming is not None:
                passing = incoming.wait()
        result = total.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, documents, result, total.lse)
        ctx.group = group
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, documents, result, lse = ctx.saved_tensors
        group, dtype = ctx.group, accumulate_dtype(query.dtype)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        grad_query = torch.zeros(query.shape, dtype=dtype, device=query.device)
        passing = torch.stack([key, value])
        grads = torch.zeros(passing.shape, dtype=dtype, device=query.device)  # of what is passing
        incoming_grads: _Passing | None = None
        for step in range(size):
            incoming = _pass_on(passing, group) if step < size - 1 else None
            source = (rank - step) % size
            block = ring_block(query.shape[2], rank, source)
            part_query, part_key, part_value = block_backward(
                grad[:, :, block.queries],
                query[:, :, block.queries],
                passing[0][:, :, block.keys],
                passing[1][:, :, block.keys],
                result[:, :, block.queries],
                lse[:, :, block.queries],
                causal=block.causal,
                visible=_visible(block, documents, size, rank, source),
            )
            grad_query[:, :, block.queries] += part_query
            if incoming_grads is not None:
                grads = incoming_grads.wait()
            grads[0][:, :, block.keys] += part_key
            grads[1][:, :, block.keys] += part_value
            incoming_grads = _pass_on(grads, group)
            if incoming is not None:
                passing = incoming.wait()
        grads = incoming_grads.wait() if incoming_grads is not None else grads
        grad_key, grad_value = grads.to(query.dtype).unbind(0)
        return grad_query.to(query.dtype), grad_key, grad_value, None, None


def _visible(block: Block, documents: Tensor | None, size: int, rank: int, source: int) -> Tensor | None:
    if documents is None:
        return None
    mine, theirs = (split_sequence(documents, 1, size, member) for member in (rank, source))
    return visible_pairs(block, mine, theirs)


@dataclass(frozen=True, slots=True)
class _Passing:
    """A tensor on its way around the ring. Holds what is being sent, whose memory must live until it has left."""

    works: list[dist.Work]
    sent: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> _Passing:
    """Send to the next rank of the group and receive from the one before; every rank passes on in the same order."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    received = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
    )
    return _Passing(works, tensor, received)

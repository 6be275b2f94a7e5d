"""Ring attention: keys and values travel around a ring, and each rank adds its blocks with an online softmax.

Ring attention (arXiv 2310.01889) with head-tail chunks. A rank computes one half of every block it receives. From an
earlier rank, the head chunk is before all queries here and the tail chunk after them. From a later rank, both chunks
are between this rank's head and tail. So all ranks do the same work in every step, and only the rank's own block needs
a causal mask. Communication of the next block overlaps with computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.context_parallel.blocks import Accumulator, Block, Sight, accumulate_dtype, add_gradients, sink_gradients
from core.context_parallel.sequence_split import positions_on_rank, split_sequence
from core.watch.waiting import waiting


@dataclass(frozen=True, slots=True)
class Scores:
    """Changes to a model's scores, in addition to the causal mask.

    Attributes:
        window: Number of keys that a query sees, including itself.
        cap: Scores become cap * tanh(score / cap).
    """

    window: int | None = None
    cap: float | None = None


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    documents: Tensor | None,
    scores: Scores = Scores(),
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention by passing keys and values around a ring. Collective over the group, in forward and backward.

    Shapes are as in ``all_gather_attention``. ``sinks`` [heads] are an additional score in each query's
    denominator, and their gradient covers only this rank's queries.
    """
    query, key, value = (rearrange(part, "s b n d -> b n s d") for part in (query, key, value))
    output: Tensor = _RingAttention.apply(query, key, value, sinks, documents, scores, group)
    return rearrange(output, "b n s d -> s b n d")


def ring_block(length: int, rank: int, source: int) -> Block:
    """Return the block that ``rank`` computes with the keys of ``source``, at ``length`` positions per rank."""
    everything, half = slice(0, length), length // 2
    if source == rank:
        return Block(everything, everything, causal=True)
    if source < rank:
        return Block(everything, slice(0, half))
    return Block(slice(half, length), everything)


class _RingAttention(torch.autograd.Function):
    """Autograd function of ring attention.

    In backward the keys and values travel again, and their gradients travel with them back to the owner.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        documents: Tensor | None,
        scores: Scores,
        group: dist.ProcessGroup,
    ) -> Tensor:
        size, rank = group.size(), group.rank()
        total = Accumulator(query)
        passing = torch.stack([key, value])
        for step in range(size):
            incoming = pass_on(passing, group) if step < size - 1 else None
            source = (rank - step) % size  # its own block first: there every query sees a key, itself
            block = ring_block(query.shape[2], rank, source)
            sight = ring_sight(documents, scores, query.shape[2], group, source)
            total.attend(block, query, passing[0], passing[1], sight)
            if incoming is not None:
                passing = incoming.wait()
        if sinks is not None:
            total.add_sinks(sinks)
        result = total.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, documents, result, total.lse)
        ctx.group, ctx.scores = group, scores
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, documents, result, lse = ctx.saved_tensors
        group, dtype = ctx.group, accumulate_dtype(query.dtype)
        size, rank = group.size(), group.rank()
        grad_query = torch.zeros(query.shape, dtype=dtype, device=query.device)
        passing = torch.stack([key, value])
        returning: Passing | None = None  # gradients of the passing keys and values
        for step in range(size):
            incoming = pass_on(passing, group) if step < size - 1 else None
            source = (rank - step) % size
            block = ring_block(query.shape[2], rank, source)
            grads = torch.zeros(passing.shape, dtype=dtype, device=query.device)
            totals = grad_query, grads[0], grads[1]
            sight = ring_sight(documents, ctx.scores, query.shape[2], group, source)
            add_gradients(totals, block, grad, query, passing[0], passing[1], result, lse, sight)
            if returning is not None:
                grads += returning.wait()
            returning = pass_on(grads, group)
            if incoming is not None:
                passing = incoming.wait()
        assert returning is not None, "a ring has at least one rank"
        grad_key, grad_value = returning.wait().to(query.dtype).unbind(0)
        of_sinks = None if sinks is None else sink_gradients(grad, result, lse, sinks)
        return grad_query.to(query.dtype), grad_key, grad_value, of_sinks, None, None, None


def ring_sight(documents: Tensor | None, scores: Scores, length: int, group: dist.ProcessGroup, source: int) -> Sight:
    """Return the mask between this rank's queries and the keys of rank ``source``, with ``length`` positions each."""
    ranks = (group.rank(), source)
    parts = None if documents is None else [split_sequence(documents, 1, group.size(), rank) for rank in ranks]
    places = None if scores.window is None else [positions_on_rank(length, group.size(), rank) for rank in ranks]
    return Sight(
        None if parts is None else (parts[0], parts[1]),
        None if places is None else (places[0], places[1]),
        scores.window,
        cap=scores.cap,
    )


@dataclass(frozen=True, slots=True)
class Passing:
    """Tensor in transit around the ring. Keeps the sent tensor alive until the send has completed."""

    works: list[dist.Work]
    sent: Tensor
    received: Tensor
    group: dist.ProcessGroup

    def wait(self) -> Tensor:
        with waiting("keys and values of the ring", self.group):
            for work in self.works:
                work.wait()
        return self.received


def pass_on(tensor: Tensor, group: dist.ProcessGroup) -> Passing:
    """Send a tensor to the next rank of the group and receive one from the previous rank.

    Every rank must call it in the same order. The transfer's ``wait()`` returns the received tensor.
    """
    size, rank = group.size(), group.rank()
    received = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
    )
    return Passing(works, tensor, received, group)

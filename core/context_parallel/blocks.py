"""Attention between a block of queries and a block of keys, and the exact sum of blocks (online softmax).

The output of attention over several blocks of keys is a weighted sum of the blocks' outputs. The weight of a block is
its share of the softmax denominator. So a block returns its output and the logarithm of its denominator, ``lse``. In
backward, the final output and ``lse`` make a block's gradients equal to its part of the full attention's gradients
(FlashAttention-2, arXiv 2307.08691, section 3.1; ring attention, arXiv 2310.01889).

Shapes: queries [b, heads, s, d], keys and values [b, groups, t, d] with groups that divide heads, lse [b, heads, s]. A
sink is an additional score in each query's softmax, one number per head, with a value of zero. It belongs only to the
denominator, so it is added once, to the sum of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.context_parallel.kernels import Kernel, kernel_for

# If scores are materialized, then for this many queries at a time: [b, heads, 512, t] instead of [b, heads, s, t].
TILE_ROWS = 512


@dataclass(frozen=True, slots=True)
class Block:
    """Pairs of queries and keys, each given as a slice of positions.

    If ``causal`` is True, both slices are the same positions, and a query sees its own and earlier keys. Otherwise all
    keys come before the queries.
    """

    queries: slice
    keys: slice
    causal: bool = False

    def tiles(self, rows: int) -> Iterator[Block]:
        """Yield the same pairs as blocks of at most ``rows`` queries. For each query the causal block comes first."""
        keys_ahead = self.keys.start - self.queries.start
        for first in range(self.queries.start, self.queries.stop, rows):
            queries = slice(first, min(first + rows, self.queries.stop))
            if not self.causal:
                yield Block(queries, self.keys)
                continue
            yield Block(queries, slice(queries.start + keys_ahead, queries.stop + keys_ahead), causal=True)
            if first > self.queries.start:
                yield Block(queries, slice(self.keys.start, first + keys_ahead))


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """Mask and score cap of an attention, in addition to the causality of its blocks.

    The tensors cover all queries and keys, and a block selects its slices.

    Attributes:
        documents: Document numbers of the queries [b, s] and of the keys [b, t]. A query only sees keys of its own
            document.
        places: Positions in the full sequence, [s] and [t], on the CPU.
        window: A query sees the last ``window`` positions, including its own. Needs ``places``.
        pairs: [b, 1 or heads, s, t], True if a query sees a key.
        cap: Scores become cap * tanh(score / cap).
    """

    documents: tuple[Tensor, Tensor] | None = None
    places: tuple[Tensor, Tensor] | None = None
    window: int | None = None
    pairs: Tensor | None = None
    cap: float | None = None

    def misses(self, block: Block) -> bool:
        """Return ``True`` if all keys of a block are before the windows of all its queries."""
        if self.window is None or self.places is None:
            return False
        queries, keys = self.places[0][block.queries], self.places[1][block.keys]
        return bool(keys.max() <= queries.min() - self.window)

    def visible(self, block: Block, device: torch.device) -> Tensor | None:
        """Return the mask [b or 1, 1 or heads, s, t] of a block, True if a query may see a key, or ``None`` without a
        mask.
        """
        found = None if self.pairs is None else self.pairs[:, :, block.queries, block.keys]
        if self.documents is not None:
            mine, theirs = self.documents[0][:, block.queries, None], self.documents[1][:, None, block.keys]
            found = (mine == theirs).unsqueeze(1) if found is None else found & (mine == theirs).unsqueeze(1)
        if self.window is not None and self.places is not None:
            queries, keys = self.places[0][block.queries, None], self.places[1][block.keys]
            near = (keys > queries - self.window).to(device)
            found = near[None, None] if found is None else found & near
        return found

    def kernel(self, query: Tensor, key: Tensor, value: Tensor) -> Kernel | None:
        """Return the fused kernel for these tensors, or ``None`` if scores must be materialized (any mask or cap)."""
        parts = (self.documents, self.window, self.pairs, self.cap)
        return kernel_for(query, key, value) if all(part is None for part in parts) else None


class Accumulator:
    """Running sum of attention over blocks of keys.

    The first block must let every query see at least one key. ``output`` [b, heads, s, d] and ``lse`` [b, heads, s] are
    fp32 for 16-bit inputs, else in the input's dtype.
    """

    def __init__(self, query: Tensor) -> None:
        dtype = accumulate_dtype(query.dtype)
        self.output = torch.zeros(query.shape, dtype=dtype, device=query.device)
        self.lse = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)

    def attend(self, block: Block, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> None:
        """Add the attention of a block, whose slices select from all queries, keys, values and ``sight``."""
        kernel = sight.kernel(query, key, value)
        for tile in _tiles(block, sight, kernel):
            part = query[:, :, tile.queries], key[:, :, tile.keys], value[:, :, tile.keys]
            output, lse = block_forward(*part, tile, sight, kernel)
            self._add(tile.queries, output, lse)

    def add_sinks(self, sinks: Tensor) -> None:
        """Add each head's sink [heads] to the denominators, after the last block."""
        before = self.lse
        self.lse = torch.logaddexp(before, sinks.to(before.dtype).view(1, -1, 1))
        self.output.mul_((before - self.lse).exp().unsqueeze(-1))

    def _add(self, queries: slice, output: Tensor, lse: Tensor) -> None:
        total, seen = self.output[:, :, queries], self.lse[:, :, queries]
        together = torch.logaddexp(seen, lse)
        finite = _finite(together)
        total.mul_((seen - finite).exp().unsqueeze(-1))
        total.add_(output * (lse - finite).exp().unsqueeze(-1))
        seen.copy_(together)


def add_gradients(
    totals: tuple[Tensor, Tensor, Tensor],
    block: Block,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    sight: Sight,
) -> None:
    """Add a block's gradients of queries, keys and values to ``totals`` in place.

    ``grad``, ``output`` and ``lse`` belong to the full attention. The block's slices select from all tensors.
    """
    kernel = sight.kernel(query, key, value)
    for tile in _tiles(block, sight, kernel):
        parts = block_backward(
            grad[:, :, tile.queries],
            query[:, :, tile.queries],
            key[:, :, tile.keys],
            value[:, :, tile.keys],
            output[:, :, tile.queries],
            lse[:, :, tile.queries],
            tile,
            sight,
            kernel,
        )
        for total, part, where in zip(totals, parts, (tile.queries, tile.keys, tile.keys), strict=True):
            total[:, :, where] += part


def sink_gradients(grad: Tensor, output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradients [heads] of sinks, from the final output and its denominators including the sinks."""
    shares = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
    return -(shares * (grad.to(lse.dtype) * output.to(lse.dtype)).sum(dim=-1)).sum(dim=(0, 2)).to(sinks.dtype)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], sight: Sight, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention [b, heads, s, d] as a sum of blocks, with optional ``sinks`` [heads].

    To save memory, the scores of all queries and keys never exist at once, and none are saved for backward.
    """
    output: Tensor = _BlockAttention.apply(query, key, value, sinks, sight, blocks)
    return output


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        sight: Sight,
        blocks: Sequence[Block],
    ) -> Tensor:
        total = Accumulator(query)
        for block in blocks:
            total.attend(block, query, key, value, sight)
        if sinks is not None:
            total.add_sinks(sinks)
        result = total.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, total.lse)
        ctx.sight, ctx.blocks = sight, blocks
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, result, lse = ctx.saved_tensors
        dtype = accumulate_dtype(query.dtype)
        grads = tuple(torch.zeros(part.shape, dtype=dtype, device=part.device) for part in (query, key, value))
        for block in ctx.blocks:
            add_gradients(grads, block, grad, query, key, value, result, lse, ctx.sight)
        of_sinks = None if sinks is None else sink_gradients(grad, result, lse, sinks)
        return *(part.to(query.dtype) for part in grads), of_sinks, None, None


def _tiles(block: Block, sight: Sight, kernel: Kernel | None) -> Iterator[Block]:
    if kernel is not None:
        yield block
        return
    for tile in block.tiles(TILE_ROWS):
        if not sight.misses(tile):
            yield tile


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf with 0 for queries that see no key, so that their weights are 0 and not NaN."""
    return lse.masked_fill(lse.isneginf(), 0.0)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype over blocks: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def block_forward(
    query: Tensor, key: Tensor, value: Tensor, block: Block, sight: Sight, kernel: Kernel | None
) -> tuple[Tensor, Tensor]:
    """Return output and lse of one block's queries, keys and values: 0 and -inf for a query that sees no key.

    The block selects from the mask of ``sight``. Without a fused ``kernel`` the scores are materialized.
    """
    if kernel is not None:
        output, lse = kernel.forward(query, key, value, block.causal)
        return output, lse.to(accumulate_dtype(query.dtype))
    scores = _scores(query, key, block, sight)
    lse = torch.logsumexp(scores, dim=-1)
    shares = (scores - _finite(lse).unsqueeze(-1)).exp()
    groups = key.shape[1]
    output = rearrange(shares, "b (g r) s t -> b g (r s) t", g=groups) @ value.to(shares.dtype)
    return rearrange(output, "b g (r s) d -> b (g r) s d", s=query.shape[2]), lse


def block_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    block: Block,
    sight: Sight,
    kernel: Kernel | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one block's queries, keys and values.

    ``grad``, ``output`` and ``lse`` belong to the full attention, for this block's queries. Without a fused ``kernel``
    the scores are materialized.
    """
    if kernel is not None:
        return kernel.backward(grad.to(query.dtype), query, key, value, output.to(query.dtype), lse, block.causal)
    scores = _scores(query, key, block, sight)
    shares = (scores - _finite(lse).unsqueeze(-1)).exp()
    if sight.cap is not None:
        slope = 1 - (scores.masked_fill(scores.isneginf(), 0.0) / sight.cap).square()  # derivative of the capped scores
    groups, length, scale = key.shape[1], query.shape[2], query.shape[-1] ** -0.5
    grad, output = grad.to(shares.dtype), output.to(shares.dtype)
    through_output = (grad * output).sum(dim=-1, keepdim=True)  # the softmax backward subtracts it from every score
    shares = rearrange(shares, "b (g r) s t -> b g (r s) t", g=groups)
    grad, query, through_output = (
        rearrange(part.to(shares.dtype), "b (g r) s d -> b g (r s) d", g=groups)
        for part in (grad, query, through_output)
    )
    grad_value = shares.mT @ grad
    grad_scores = shares * (grad @ value.to(shares.dtype).mT - through_output) * scale
    if sight.cap is not None:
        grad_scores *= rearrange(slope, "b (g r) s t -> b g (r s) t", g=groups)
    grad_query = rearrange(grad_scores @ key.to(shares.dtype), "b g (r s) d -> b (g r) s d", s=length)
    return grad_query, grad_scores.mT @ query, grad_value


def _scores(query: Tensor, key: Tensor, block: Block, sight: Sight) -> Tensor:
    """Return scaled and capped scores [b, heads, s, t] in the accumulation dtype, -inf for masked pairs."""
    dtype, groups = accumulate_dtype(query.dtype), key.shape[1]
    scaled = rearrange(query.to(dtype), "b (g r) s d -> b g (r s) d", g=groups) * query.shape[-1] ** -0.5
    scores = rearrange(scaled @ key.to(dtype).mT, "b g (r s) t -> b (g r) s t", s=query.shape[2])
    if sight.cap is not None:
        scores = sight.cap * torch.tanh(scores / sight.cap)
    visible = sight.visible(block, scores.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if block.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores

"""Attention of a block of queries to a block of keys, and the exact sum of blocks (online softmax).

The output of attention over several blocks of keys is the blocks' outputs weighted by the share of the softmax's
denominator that each of them holds, so a block gives its output and the logarithm of its denominator, `lse`. Backward
goes the other way: with the final output and `lse`, a block's gradients are those it has in the whole
(FlashAttention-2, arXiv 2307.08691, section 3.1; ring attention, arXiv 2310.01889).

Shapes: queries [b, heads, s, d], keys and values [b, groups, t, d] with groups that divide heads, lse [b, heads, s].
Documents: [b, s] of the queries and [b, t] of the keys, or None; a query sees the keys of its own document only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

# Where scores are written out, those of so many queries at a time: [b, heads, 512, t] instead of [b, heads, s, t].
TILE_ROWS = 512


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of one slice attend to keys of another; causal: the two are the same positions, so only to earlier ones.

    Every other block is of keys that all lie before its queries.
    """

    queries: slice
    keys: slice
    causal: bool = False

    def tiles(self, rows: int) -> Iterator[Block]:
        """The same pairs as blocks of at most `rows` queries; of each query's blocks the causal one comes first."""
        keys_ahead = self.keys.start - self.queries.start
        for first in range(self.queries.start, self.queries.stop, rows):
            queries = slice(first, min(first + rows, self.queries.stop))
            if not self.causal:
                yield Block(queries, self.keys)
                continue
            yield Block(queries, slice(queries.start + keys_ahead, queries.stop + keys_ahead), causal=True)
            if first > self.queries.start:
                yield Block(queries, slice(self.keys.start, first + keys_ahead))


class Accumulator:
    """Adds up blocks of keys. The first block must let every query see at least one key.

    output: [b, heads, s, d] and lse: [b, heads, s], in fp32 for 16-bit inputs, else in their dtype.
    """

    def __init__(self, query: Tensor) -> None:
        dtype = accumulate_dtype(query.dtype)
        self.output = torch.zeros(query.shape, dtype=dtype, device=query.device)
        self.lse = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)

    def attend(
        self,
        block: Block,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_documents: Tensor | None,
        key_documents: Tensor | None,
    ) -> None:
        """Add what a block's queries see of its keys; all arguments are those that the block's slices cut."""
        for tile in _tiles(block, query, query_documents):
            output, lse = block_forward(
                query[:, :, tile.queries],
                key[:, :, tile.keys],
                value[:, :, tile.keys],
                causal=tile.causal,
                visible=_visible(tile, query_documents, key_documents),
            )
            self._add(tile.queries, output, lse)

    def _add(self, queries: slice, output: Tensor, lse: Tensor) -> None:
        total, seen = self.output[:, :, queries], self.lse[:, :, queries]
        together = torch.logaddexp(seen, lse)
        total.mul_((seen - together).exp().unsqueeze(-1))
        total.add_(output * (lse - together).exp().unsqueeze(-1))
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
    query_documents: Tensor | None,
    key_documents: Tensor | None,
) -> None:
    """Add a block's gradients of queries, keys and values to `totals`; grad, output, lse: of the whole attention."""
    for tile in _tiles(block, query, query_documents):
        parts = block_backward(
            grad[:, :, tile.queries],
            query[:, :, tile.queries],
            key[:, :, tile.keys],
            value[:, :, tile.keys],
            output[:, :, tile.queries],
            lse[:, :, tile.queries],
            causal=tile.causal,
            visible=_visible(tile, query_documents, key_documents),
        )
        for total, part, where in zip(totals, parts, (tile.queries, tile.keys, tile.keys), strict=True):
            total[:, :, where] += part


def _tiles(block: Block, query: Tensor, documents: Tensor | None) -> Iterator[Block]:
    return iter([block]) if _is_fused(query, documents) else block.tiles(TILE_ROWS)


def _is_fused(query: Tensor, mask: Tensor | None) -> bool:
    """Torch's CPU kernel takes every dtype and returns lse; not so for queries that a mask lets see nothing."""
    return mask is None and query.device.type == "cpu"


def _visible(block: Block, query_documents: Tensor | None, key_documents: Tensor | None) -> Tensor | None:
    """Pairs of query and key [b, 1, s, t] in the same document, earlier or later; None without documents."""
    if query_documents is None or key_documents is None:
        return None
    return (query_documents[:, block.queries, None] == key_documents[:, None, block.keys]).unsqueeze(1)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums over blocks: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def block_forward(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and lse of one block. A query that sees no key has output 0 and lse -inf."""
    if _is_fused(query, visible):
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
        return output, lse.to(accumulate_dtype(query.dtype))
    scores = _scores(query, key, causal, visible)
    lse = torch.logsumexp(scores, dim=-1)
    shares = (scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp()
    groups = key.shape[1]
    output = rearrange(shares, "b (g r) s t -> b g (r s) t", g=groups) @ value.to(shares.dtype)
    return rearrange(output, "b g (r s) d -> b (g r) s d", s=query.shape[2]), lse


def block_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *,
    causal: bool, visible: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of one block's queries, keys and values.

    grad, output, lse: of the whole attention, for this block's queries.
    """
    if _is_fused(query, visible):
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.to(query.dtype), query, key, value, output.to(query.dtype), lse, 0.0, causal
        )
        return grads
    shares = (_scores(query, key, causal, visible) - lse.unsqueeze(-1)).exp()
    groups, length, scale = key.shape[1], query.shape[2], query.shape[-1] ** -0.5
    grad, output = grad.to(shares.dtype), output.to(shares.dtype)
    through_output = (grad * output).sum(dim=-1, keepdim=True)  # what raising all shares alike would change
    shares = rearrange(shares, "b (g r) s t -> b g (r s) t", g=groups)
    grad, query, through_output = (
        rearrange(part.to(shares.dtype), "b (g r) s d -> b g (r s) d", g=groups)
        for part in (grad, query, through_output)
    )
    grad_value = shares.mT @ grad
    grad_scores = shares * (grad @ value.to(shares.dtype).mT - through_output) * scale
    grad_query = rearrange(grad_scores @ key.to(shares.dtype), "b g (r s) d -> b (g r) s d", s=length)
    return grad_query, grad_scores.mT @ query, grad_value


def _scores(query: Tensor, key: Tensor, causal: bool, visible: Tensor | None) -> Tensor:
    """Scaled scores [b, heads, s, t] in the dtype of sums, -inf where a query does not see a key."""
    dtype, groups = accumulate_dtype(query.dtype), key.shape[1]
    scaled = rearrange(query.to(dtype), "b (g r) s d -> b g (r s) d", g=groups) * query.shape[-1] ** -0.5
    scores = rearrange(scaled @ key.to(dtype).mT, "b g (r s) t -> b (g r) s t", s=query.shape[2])
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores

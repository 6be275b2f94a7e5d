"""Context parallelism by all-to-all: each rank exchanges its positions for the full sequence of some heads.

DeepSpeed-Ulysses, arXiv 2309.14509. A second all-to-all restores the split by positions. The traffic does not grow with
the number of ranks, which is limited by the number of key/value heads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from core.context_parallel.documents import visible_tokens
from core.context_parallel.sequence_split import join_sequence, rank_order
from core.number_ranges import either, nearest_divisors
from core.tensor_parallel.mappings import Mapping, mapping
from core.watch.waiting import waiting


def all_to_all_attention(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, documents: Tensor | None
) -> Tensor:
    """Compute attention over the full sequence for this rank's share of the heads. Collective in forward and backward.

    Shapes are as in ``all_gather_attention``.
    """
    size = group.size()
    heads, groups = query.shape[2], key.shape[2]
    check_heads(heads, groups, size)
    # [cp, s / cp, b, (heads + 2 groups) / cp, d]: one message a rank, with its queries, keys and values.
    by_heads = [rearrange(part, "s b (cp n) d -> cp s b n d", cp=size) for part in (query, key, value)]
    mixed = rearrange(exchange(torch.cat(by_heads, dim=3), group), "cp s b n d -> (cp s) b n d")
    mixed = rearrange(join_sequence(mixed, 0, size), "s b n d -> b n s d")
    query, key, value = mixed.split([heads // size, groups // size, groups // size], dim=1)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if documents is None else visible_tokens(documents),
        is_causal=documents is None,
        enable_gqa=heads != groups,
    )
    parts = rank_order(rearrange(output, "b n s d -> s b n d"), 0, size)
    returned = exchange(rearrange(parts, "(cp s) b n d -> cp s b n d", cp=size), group)
    return rearrange(returned, "cp s b n d -> s b (cp n) d")


def check_heads(heads: int, groups: int, cp: int) -> None:
    """Check that one tensor-parallel rank's heads divide over context parallelism.

    Args:
        heads (int): Query heads of one tensor-parallel rank.
        groups (int): Key/value heads of one tensor-parallel rank.
        cp (int): Context-parallel size.

    Raises:
        ValueError: If they do not divide. The message has the arithmetic and the valid sizes.
    """
    if groups % cp == 0:
        return
    more = -(-groups // cp) * cp
    raise ValueError(
        f"cp_comm_type 'a2a' distributes heads over {cp} context-parallel ranks, but a tensor-parallel rank has "
        f"{groups} key/value heads for {heads} query heads ({groups} / {cp} = {groups / cp:g}); use "
        f"context_parallel_size {either(nearest_divisors(groups, cp))}, {more} key/value heads, or cp_comm_type 'p2p' "
        "or 'all_gather'"
    )


def exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange ``parts``, [ranks, ...]: send part r to rank r, and receive its part for this rank. Collective."""
    exchanged: Tensor = _Exchange.apply(parts, group)
    return exchanged


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    with waiting("an exchange of sequence for heads", group):
        dist.all_to_all_single(received, parts, group=group)
    return received


_Exchange: Mapping = mapping(_all_to_all, lambda: _Exchange)  # its own inverse, so its own dual

"""Context parallelism by all-gather: every rank gathers all keys and values.

Each layer needs one all-gather in forward and one reduce-scatter in backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from core.context_parallel.blocks import Block, Sight, block_attention
from core.context_parallel.sequence_split import join_sequence, split_sequence
from core.tensor_parallel.mappings import gather_from_sequence_parallel_region


def all_gather_attention(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, documents: Tensor | None
) -> Tensor:
    """Compute attention with gathered keys and values. Collective over the group, in forward and backward.

    Queries and the result have shape [s / cp, b, heads, d], keys and values [s / cp, b, groups, d]. ``documents`` has
    the document numbers of the full sequence, [b, s].
    """
    size, rank = group.size(), group.rank()
    both = gather_from_sequence_parallel_region(torch.stack([key, value], dim=1), group=group)
    key, value = join_sequence(both, 0, size).unbind(dim=1)
    query, key, value = (rearrange(part, "s b n d -> b n s d") for part in (query, key, value))
    sight = Sight() if documents is None else Sight((split_sequence(documents, 1, size, rank), documents))
    output = block_attention(query, key, value, full_key_blocks(query.shape[2], size, rank), sight)
    return rearrange(output, "b n s d -> s b n d")


def full_key_blocks(length: int, size: int, rank: int) -> list[Block]:
    """Return the attention blocks of a rank's ``length`` queries with all ``length * size`` keys.

    Each of the rank's two chunks attends to itself and to everything before it.
    """
    chunk = length // 2
    blocks, before = [], []
    for place, number in enumerate((rank, 2 * size - 1 - rank)):
        queries = slice(place * chunk, (place + 1) * chunk)
        blocks.append(Block(queries, slice(number * chunk, (number + 1) * chunk), causal=True))
        if number:
            before.append(Block(queries, slice(0, number * chunk)))
    return blocks + before

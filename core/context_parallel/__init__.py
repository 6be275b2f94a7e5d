"""Attention over a sequence whose positions are split over context-parallel ranks."""

from core.context_parallel.all_to_all import check_heads
from core.context_parallel.attention import COMM_TYPES, context_parallel_attention, context_parallel_group
from core.context_parallel.documents import PackedTokens, documents_from_ends, pack_tokens, visible_tokens
from core.context_parallel.sequence_split import (
    check_sequence_length,
    get_batch_on_this_cp_rank,
    join_sequence,
    positions_on_rank,
    split_sequence,
)

__all__ = [
    "COMM_TYPES",
    "PackedTokens",
    "context_parallel_attention",
    "context_parallel_group",
    "check_heads",
    "check_sequence_length",
    "documents_from_ends",
    "get_batch_on_this_cp_rank",
    "join_sequence",
    "pack_tokens",
    "positions_on_rank",
    "split_sequence",
    "visible_tokens",
]

"""Attention masks: the causal mask, and documents that share a row, by Megatron's PackedSeqParams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.context_parallel import documents_from_ends
from core.tensor_parallel.mappings import group_size


@dataclass
class PackedSeqParams:
    """Documents that share a row of tokens, by the numbers of tokens before each of them and after the last."""

    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None
    local_cp_size: int | None = None
    cp_group: Any = None
    total_tokens: int | None = None
    seq_idx: Tensor | None = None
    tokens_per_sample: int | None = None
    pad_between_seqs: bool | None = None


def check_causal(mask: Tensor | None) -> None:
    """ValueError for an attention mask that is not the causal one. Waits for a GPU; None is quicker."""
    if mask is None:
        return
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype != torch.bool or not bool((mask == causal).all()):
        raise ValueError(
            f"attention_mask {list(mask.shape)} is not the causal one (bool, True above the diagonal), and no other is "
            "built; pass None, and packed_seq_params where documents share a row"
        )


def packed_documents(packed: PackedSeqParams, cp_group: Any, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Document number and position of each token [1, t] of a row that is packed by cu_seqlens; padding may follow.

    Raises ValueError for keys that are packed otherwise than queries, and for ends that are not the row's.
    """
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    keys = packed.cu_seqlens_kv if packed.cu_seqlens_kv_padded is None else packed.cu_seqlens_kv_padded
    for wrong, what in (
        (packed.qkv_format not in (None, "thd"), f"qkv_format is {packed.qkv_format!r}; documents of a row are 'thd'"),
        (ends is None, "cu_seqlens_q is None; it says where documents end"),
        (rows != 1, f"there are {rows} rows of tokens; documents share one row [1, t]"),
        (group_size(packed.cp_group or cp_group) > 1 or packed.local_cp_size not in (None, 1),
         "with context parallelism Megatron splits each document for itself, which is not built; core.models.GPTModel "
         "takes document_ids of rows that get_batch_on_this_cp_rank has split"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"packed_seq_params: {what}")
    assert ends is not None, "refused above"
    if keys is not None and not torch.equal(keys, ends):
        raise ValueError(
            f"packed_seq_params: cu_seqlens_kv is {keys.tolist()} and cu_seqlens_q {ends.tolist()}; a token sees the "
            "tokens of its own document, so give both the same, or leave cu_seqlens_kv out"
        )
    try:
        return documents_from_ends(ends, length)
    except ValueError as error:
        raise ValueError(f"packed_seq_params: cu_seqlens_q: {error}") from None

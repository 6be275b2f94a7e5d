"""Packed documents: which tokens attend to which, and the arguments a model gets for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from core.context_parallel.sequence_split import join_sequence
from core.watch.waiting import waiting


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """Document boundaries of a microbatch's tokens, for attention.

    documents: [b, s], one number a token of the whole sequence, on every rank; a token attends to those before it with
    the same number. positions: [b, s / cp], those of this rank's tokens, where they are not counted through.
    """

    documents: Tensor | None = None
    positions: Tensor | None = None


def pack_tokens(
    document_ids: Tensor | None, position_ids: Tensor | None, cp_group: dist.ProcessGroup | None
) -> PackedTokens | None:
    """PackedTokens of this rank's document_ids and position_ids, [b, s / cp] each; None where there are neither.

    Collective over the group where document_ids are given.
    """
    if document_ids is None:
        return None if position_ids is None else PackedTokens(positions=position_ids)
    size = 1 if cp_group is None else dist.get_world_size(cp_group)
    if size == 1:
        return PackedTokens(document_ids, position_ids)
    parts = [torch.empty_like(document_ids, memory_format=torch.contiguous_format) for _ in range(size)]
    assert cp_group is not None, "a group of several ranks"
    with waiting("the documents of other parts of the sequence", cp_group):
        dist.all_gather(parts, document_ids.contiguous(), group=cp_group)
    return PackedTokens(join_sequence(torch.cat(parts, 1), 1, size), position_ids)


def documents_from_ends(ends: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """document_ids and position_ids [1, length] of a row whose documents end where `ends` say: 0, 3, 7 for two.

    Tokens behind the last end are padding, a document of their own. ValueError for ends that are not the row's.
    """
    if int(ends[0]) != 0 or int(ends[-1]) > length or bool((ends.diff() < 0).any()):
        raise ValueError(f"{ends.tolist()} for {length} tokens; ends go up from 0 to at most their number")
    token = torch.arange(length, device=ends.device)
    document = torch.searchsorted(ends[1:].long(), token, right=True)
    return document.unsqueeze(0), (token - ends.long()[document]).unsqueeze(0)


def visible_tokens(documents: Tensor) -> Tensor:
    """Pairs of query and key [b, 1, s, s] where the key is of the same document and not later."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()

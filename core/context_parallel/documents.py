"""Packed documents: attention masks, and the model's arguments for them."""

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

    Attributes:
        documents: [b, s], one number per token of the full sequence, on every rank. A token sees itself and earlier
            tokens with the same number.
        positions: [b, s / cp], positions of this rank's tokens, if they do not count through the sequence.
    """

    documents: Tensor | None = None
    positions: Tensor | None = None


def pack_tokens(
    document_ids: Tensor | None, position_ids: Tensor | None, cp_group: dist.ProcessGroup | None
) -> PackedTokens | None:
    """Build the ``PackedTokens`` of a microbatch, or return ``None`` if both tensors are ``None``.

    This is a collective over the group if ``document_ids`` is given, because attention needs the full sequence's
    numbers.

    Args:
        document_ids (Tensor): [b, s / cp], this rank's part.
        position_ids (Tensor): [b, s / cp], this rank's part.
        cp_group (ProcessGroup): Context-parallel group.
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
    """Build document_ids and position_ids, [1, length], of a packed row.

    Tokens after the last end are padding and form a separate document.

    Args:
        ends (Tensor): Cumulative document lengths, starting at 0, such as [0, 3, 7] for two documents.
        length (int): Number of tokens in the row.

    Raises:
        ValueError: If ``ends`` does not start at 0, decreases, or exceeds ``length``.
    """
    if int(ends[0]) != 0 or int(ends[-1]) > length or bool((ends.diff() < 0).any()):
        raise ValueError(f"{ends.tolist()} for {length} tokens; ends go up from 0 to at most their number")
    token = torch.arange(length, device=ends.device)
    document = torch.searchsorted(ends[1:].long(), token, right=True)
    return document.unsqueeze(0), (token - ends.long()[document]).unsqueeze(0)


def visible_tokens(documents: Tensor) -> Tensor:
    """Return the mask [b, 1, s, s], True if the key is in the query's document and not after it."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()

"""Positions of a sequence on each context-parallel rank.

A causal token attends to all tokens before it, so the last positions cost the most. A sequence is split into 2 * size
chunks, and rank r gets chunk r from the head and chunk 2 * size - 1 - r from the tail, so that every rank computes the
same number of query/key pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from core import parallel_state
from core.number_ranges import either, nearest_multiples

OF_WHOLE = "whole_of_this_part"  # attribute with the full sequence of tokens; core.verify compares it between ranks


def check_sequence_length(length: int, cp: int, tp: int = 1, sequence_parallel: bool = False) -> None:
    """Check that a sequence length divides over the ranks.

    Args:
        length (int): Number of tokens in a full sequence.
        cp (int): Context-parallel size. Above 1, the sequence is split into 2 * cp chunks.
        tp (int, optional): Tensor-parallel size.
        sequence_parallel (bool, optional): True if each context-parallel rank's part is split again over tp.

    Raises:
        ValueError: If it does not divide. The message has the arithmetic and the nearest valid lengths.
    """
    halves = 2 * cp if cp > 1 else 1
    split = math.lcm(halves, cp * tp) if sequence_parallel else halves
    if length < 1 or length % split:
        ways = [f"2 * context_parallel_size (2 * {cp} = {2 * cp})"] if cp > 1 else []
        if sequence_parallel:
            product = f"{cp} * {tp} = {cp * tp}"
            ways.append(f"context_parallel_size * tensor_model_parallel_size ({product}) under sequence_parallel")
        raise ValueError(
            f"sequence length {length} is not divisible by {' and '.join(ways) or 1}: {length} / {split} = "
            f"{length / split:g}; use {either(nearest_multiples(length, split))}"
        )


def split_sequence(whole: Tensor, dim: int, cp: int, rank: int) -> Tensor:
    """Return the head and tail chunk of one context-parallel rank.

    Causal attention costs more for later positions, so each rank gets one chunk from each end. With cp = 2, rank 0 gets
    chunks 0 and 3, and rank 1 gets chunks 1 and 2.

    Args:
        whole (Tensor): [..., s, ...], the full sequence.
        dim (int): Dimension of the sequence.
        cp (int): Context-parallel size.
        rank (int): Context-parallel rank.

    Returns:
        Tensor of shape [..., s / cp, ...], or ``whole`` itself if cp is 1.
    """
    if cp == 1:
        return whole
    check_sequence_length(whole.shape[dim], cp)
    chunk = whole.shape[dim] // (2 * cp)
    head, tail = rank * chunk, (2 * cp - 1 - rank) * chunk
    part = torch.cat([whole.narrow(dim, head, chunk), whole.narrow(dim, tail, chunk)], dim)
    if not (whole.is_floating_point() or whole.is_complex()):  # activations are large, and would live as long
        setattr(part, OF_WHOLE, whole)
    return part


def join_sequence(parts: Tensor, dim: int, cp: int) -> Tensor:
    """Reorder the ranks' parts to the order of positions. Inverse of the split in ``split_sequence``.

    Args:
        parts (Tensor): Parts concatenated along ``dim``, in rank order.
        dim (int): Dimension of the sequence.
        cp (int): Context-parallel size.
    """
    if cp == 1:
        return parts
    chunks = parts.chunk(2 * cp, dim)  # rank 0's head and tail, rank 1's head and tail, ...
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim)


def rank_order(whole: Tensor, dim: int, cp: int) -> Tensor:
    """Reorder a sequence to the ranks' parts, concatenated along ``dim``. The inverse of ``join_sequence``."""
    if cp == 1:
        return whole
    chunks = whole.chunk(2 * cp, dim)
    return torch.cat([chunk for rank in range(cp) for chunk in (chunks[rank], chunks[2 * cp - 1 - rank])], dim)


def positions_on_rank(length: int, cp: int, rank: int, device: torch.device | str | None = None) -> Tensor:
    """Return the positions [length], in the full sequence, of the tokens on one context-parallel rank.

    Args:
        length (int): Number of tokens on the rank.
        cp (int): Context-parallel size.
        rank (int): Context-parallel rank.
        device (torch.device | str, optional): Device of the result.
    """
    return split_sequence(torch.arange(length * cp, device=device), 0, cp, rank)


def get_batch_on_this_cp_rank(
    batch: Mapping[str, Tensor | None],
    cp_group: dist.ProcessGroup | None = None,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> dict[str, Tensor | None]:
    """Select this context-parallel rank's positions of a batch.

    Shift labels before calling it, so that the label of a chunk's last token is the token that follows it.

        batch = get_batch_on_this_cp_rank({"tokens": tokens, "labels": labels})

    Args:
        batch (Mapping[str, Tensor | None]): Tensors [b, s] or [b, s, ...], the same on all ranks of the group:
            'tokens', 'labels', 'loss_mask', 'position_ids', 'document_ids', ...
        cp_group (ProcessGroup, optional): Context-parallel group. Defaults to the group of ``parallel_state``.
        tp (int, optional): Tensor-parallel size, so that an invalid length is already rejected here.
        sequence_parallel (bool, optional): True if the model splits a rank's part again over tp.

    Returns:
        The same entries, each [b, s / cp, ...].

    Raises:
        ValueError: If the length does not divide, if lengths differ, or for an 'attention_mask' [b, 1, s, s] (use
            document_ids).
    """
    if batch.get("attention_mask") is not None:
        raise ValueError(
            "the batch has an 'attention_mask', which context parallelism does not read; attention is causal, and "
            "'document_ids' [b, s] keep packed documents apart"
        )
    if cp_group is None and parallel_state.model_parallel_is_initialized():
        cp_group = parallel_state.get_process_groups().cp
    size = 1 if cp_group is None else dist.get_world_size(cp_group)
    rank = 0 if cp_group is None else dist.get_rank(cp_group)
    shapes = {name: list(whole.shape) for name, whole in batch.items() if whole is not None}
    if any(len(shape) < 2 for shape in shapes.values()) or len({tuple(shape[:2]) for shape in shapes.values()}) > 1:
        raise ValueError(f"every tensor of a batch must be [b, s] or [b, s, ...] with the same b and s; got {shapes}")
    if shapes:
        check_sequence_length(next(iter(shapes.values()))[1], size, tp, sequence_parallel)
    return {name: None if whole is None else split_sequence(whole, 1, size, rank) for name, whole in batch.items()}

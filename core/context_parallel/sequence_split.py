"""Positions of a sequence that each context-parallel rank holds.

A causal token attends to all before it, so the last positions cost the most. A sequence is cut into 2 * size chunks and
rank r holds chunk r from the head and chunk 2 * size - 1 - r from the tail: every rank has the same number of pairs of
query and key to compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from core import parallel_state
from core.number_ranges import either, nearest_multiples

OF_WHOLE = "whole_of_this_part"  # the attribute of a part of tokens, which core.verify compares between ranks


def check_sequence_length(length: int, cp: int, tp: int = 1, sequence_parallel: bool = False) -> None:
    """ValueError, with the arithmetic and the nearest legal lengths, for a sequence that does not divide.

    length: tokens of a whole sequence. Under context parallelism it is cut into 2 * cp chunks; under sequence
    parallelism what is left on a rank is split once more over tp.
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
    """The head and the tail chunk of `whole` [..., s, ...] that rank `rank` of `cp` holds: [..., s / cp, ...]."""
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
    """The ranks' parts, one after the other along `dim` in the order of ranks, brought into the order of positions."""
    if cp == 1:
        return parts
    chunks = parts.chunk(2 * cp, dim)  # rank 0's head and tail, rank 1's head and tail, ...
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim)


def rank_order(whole: Tensor, dim: int, cp: int) -> Tensor:
    """The inverse of `join_sequence`: what each rank holds of `whole`, one rank after the other along `dim`."""
    if cp == 1:
        return whole
    chunks = whole.chunk(2 * cp, dim)
    return torch.cat([chunk for rank in range(cp) for chunk in (chunks[rank], chunks[2 * cp - 1 - rank])], dim)


def positions_on_rank(length: int, cp: int, rank: int, device: torch.device | str | None = None) -> Tensor:
    """The positions [length] in the whole sequence of the `length` tokens that rank `rank` of `cp` holds."""
    return split_sequence(torch.arange(length * cp, device=device), 0, cp, rank)


def get_batch_on_this_cp_rank(
    batch: Mapping[str, Tensor | None],
    cp_group: dist.ProcessGroup | None = None,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> dict[str, Tensor | None]:
    """This rank's positions of every tensor [b, s] of a batch that all ranks of its context-parallel group hold alike.

    batch: 'tokens', 'labels', 'loss_mask', 'position_ids', 'document_ids', ... Labels are shifted before the split, so
    that the label of a chunk's last token is the token after it. cp_group: by default parallel_state's. tp and
    sequence_parallel: how the model splits a rank's part once more, so that a length is refused here already.

    Raises ValueError for a length that does not divide, for tensors of different lengths, and for an 'attention_mask'
    [b, 1, s, s]: give document_ids.
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

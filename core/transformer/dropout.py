"""Dropout with the random streams of Note [Random streams] in core/tensor_parallel/random.py."""

from __future__ import annotations

import contextlib

import torch.nn.functional as F
from torch import Tensor

from core.tensor_parallel.random import DROPOUT_STREAM, SPLIT_DROPOUT_STREAM, get_rng_tracker


def dropout_stream(probability: float, tp_size: int, *, is_split: bool) -> contextlib.AbstractContextManager[None]:
    """Draw from the tensor-parallel group's dropout stream inside the block. No-op for a probability of 0.

    ``is_split`` means that each rank of the group has a part of the activation instead of a copy. A single rank without
    streams draws from torch's default one, as seeded by its user. Several ranks without seeded streams raise
    RuntimeError.
    """
    stream = SPLIT_DROPOUT_STREAM if is_split else DROPOUT_STREAM
    if probability == 0.0 or (tp_size == 1 and stream not in get_rng_tracker()):
        return contextlib.nullcontext()
    return get_rng_tracker().fork(stream)


def hidden_dropout(hidden: Tensor, probability: float, *, training: bool, tp_size: int, is_split: bool) -> Tensor:
    """Apply dropout to [s, b, hidden]. ``is_split`` means that the sequence is split over the tensor-parallel ranks."""
    if not training or probability == 0.0:
        return hidden
    with dropout_stream(probability, tp_size, is_split=is_split):
        return F.dropout(hidden, probability)

"""The random stream that a dropout draws from: Note [Random streams] in core/tensor_parallel/random.py."""

from __future__ import annotations

import contextlib

import torch.nn.functional as F
from torch import Tensor

from core.tensor_parallel.random import DROPOUT_STREAM, SPLIT_DROPOUT_STREAM, get_rng_tracker


def dropout_stream(probability: float, tp_size: int, *, is_split: bool) -> contextlib.AbstractContextManager[None]:
    """Inside the block a rank draws from the stream for dropout of an activation of a tensor-parallel group.

    is_split: True if each rank of the group has a part of the activation, False if all have copies. RuntimeError where
    several ranks have no streams. A rank alone then draws from torch's default one, as its user has seeded it.
    """
    stream = SPLIT_DROPOUT_STREAM if is_split else DROPOUT_STREAM
    if probability == 0.0 or (tp_size == 1 and stream not in get_rng_tracker()):
        return contextlib.nullcontext()
    return get_rng_tracker().fork(stream)


def hidden_dropout(hidden: Tensor, probability: float, *, training: bool, tp_size: int, is_split: bool) -> Tensor:
    """Dropout of [s, b, hidden]. is_split: True if its sequence is split over the `tp_size` ranks."""
    if not training or probability == 0.0:
        return hidden
    with dropout_stream(probability, tp_size, is_split=is_split):
        return F.dropout(hidden, probability)

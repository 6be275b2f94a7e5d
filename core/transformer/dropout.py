"""Dropout with the random streams of Note [Random streams] in core/tensor_parallel/random.py."""

from __future__ import annotations

import contextlib

import torch.nn.functional as F
from torch import Tensor

from core.tensor_parallel.random import DROPOUT_STREAM, SPLIT_DROPOUT_STREAM, get_rng_tracker


def dropout_stream(probability: float, tp_size: int, *, is_split: bool) -> contextlib.AbstractContextManager[None]:
    """Draw from the tensor-parallel group's dropout stream inside the block.

    A single rank without streams draws from torch's default one, as seeded by its user.

    Args:
        probability: Probability of dropout; nothing is done for 0.
        tp_size: Ranks of the tensor-parallel group.
        is_split: True if each rank of the group has a part of the activation, False if all have copies.

    Raises:
        RuntimeError: If there are several ranks and their streams were not seeded.
    """
    stream = SPLIT_DROPOUT_STREAM if is_split else DROPOUT_STREAM
    if probability == 0.0 or (tp_size == 1 and stream not in get_rng_tracker()):
        return contextlib.nullcontext()
    return get_rng_tracker().fork(stream)


def hidden_dropout(hidden: Tensor, probability: float, *, training: bool, tp_size: int, is_split: bool) -> Tensor:
    """Apply dropout to [s, b, hidden].

    Args:
        hidden: Activation.
        probability: Probability of dropout.
        training: Apply dropout only if True.
        tp_size: Ranks of the tensor-parallel group.
        is_split: True if the sequence is split over these ranks.
    """
    if not training or probability == 0.0:
        return hidden
    with dropout_stream(probability, tp_size, is_split=is_split):
        return F.dropout(hidden, probability)

"""Which random stream a dropout draws from: the rank's own for a split activation, the shared one for a replica."""

from __future__ import annotations

import contextlib

import torch.nn.functional as F
from torch import Tensor

from core.tensor_parallel.random import get_rng_tracker


def split_stream(probability: float, tp_size: int) -> contextlib.AbstractContextManager[None]:
    """Inside the block a rank draws from its own stream; nothing to do where nothing is drawn or nothing is split."""
    return get_rng_tracker().fork() if probability > 0.0 and tp_size > 1 else contextlib.nullcontext()


def hidden_dropout(hidden: Tensor, probability: float, *, training: bool, sequence_split_over: int) -> Tensor:
    """Dropout of [s, b, hidden], whose sequence is split over `sequence_split_over` ranks."""
    if not training or probability == 0.0:
        return hidden
    with split_stream(probability, sequence_split_over):
        return F.dropout(hidden, probability)

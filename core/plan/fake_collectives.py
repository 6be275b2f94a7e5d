"""Stand-ins for other ranks, for a GPU and for the start of a run while a model runs without values.

Experts have even loads, a ring has a neighbour, and there are random streams for dropout. Tensors without values are on
the CPU, where torch drops otherwise than on a GPU: it writes scores of attention out, and a mask in the input's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.context_parallel import ring
from core.hugging_face.dropout import ForwardStream
from core.moe import token_dispatcher
from core.moe.token_dispatcher import HostCounts
from core.plan.live_memory import LiveMemory
from core.tensor_parallel import chunked_loss
from core.tensor_parallel.random import DROPOUT_STREAMS, RNGState, get_rng_tracker


class EvenLoads(HostCounts):
    """As many tokens go to each expert. chosen: the share of all experts that a token goes to."""

    def __init__(self, chosen: float) -> None:
        self.chosen = chosen
        self.rows_of_expert = 0  # from one rank, of the last `rows`

    def rows(self, choices: Tensor) -> tuple[Tensor, ...]:
        """Empty indices of even loads."""
        self.rows_of_expert = math.ceil(choices.shape[0] * self.chosen)
        count = self.rows_of_expert * choices.shape[1]
        return tuple(torch.empty(count, dtype=torch.int64) for _ in range(2))

    def lists(self, counts: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
        """Even loads in the shapes of the counts."""
        held_by, (ep, local), rows = counts.shape[0] - 2, counts.shape[1:], self.rows_of_expert
        return [rows * local] * ep, [rows * local] * ep, [rows * local * ep] * held_by, [rows * ep * held_by] * local

    def of_ranks(self, rows: int, group: Any, device: torch.device) -> list[int]:
        """All ranks have as many."""
        return [rows] * int(group.size())

    def of_experts(self, choices: Tensor) -> list[int]:
        """All experts have as many."""
        return [math.ceil(choices.shape[0] * self.chosen)] * choices.shape[1]


def pass_on(tensor: Tensor, group: Any) -> ring.Passing:
    """Stand-in for the tensor that the neighbour of a ring would send."""
    return ring.Passing([group.send([tensor], 0)], tensor, torch.empty_like(tensor), group)


def attention_of_gpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attention whose kernel drops weights as it goes, which costs no memory. fp64 has no such kernel.

    The CPU's kernel wants values as wide as queries, which those of a GPU do not: they are padded.
    """
    width, wide = value.shape[-1], query.shape[-1]
    if query.dtype != torch.float64:
        args = (*args[:1], *(0.0 for _ in args[1:2]), *args[2:])
        kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
    if width >= wide:
        return ATTENTION(query, key, value, *args, **kwargs)
    return ATTENTION(query, key, F.pad(value, (0, wide - width)), *args, **kwargs)[..., :width]


def dropout_of_gpu(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout in one kernel, which keeps a byte an element for backward."""
    if inplace or not training or p == 0:
        return DROPOUT(input, p, training, inplace)
    found: Tensor = torch.native_dropout(input, p, True)[0]
    return found


def few_chunks(tokens: int, chunk: int) -> Iterator[slice]:
    """A whole chunk of tokens, which counts for all of them, and the smaller last one."""
    whole, rest = divmod(tokens, chunk)
    if whole:
        LiveMemory.times = whole
        try:
            yield slice(0, chunk)
        finally:
            LiveMemory.times = 1
    if rest:
        yield slice(whole * chunk, tokens)


ATTENTION, DROPOUT = F.scaled_dot_product_attention, F.dropout  # torch's own


@contextmanager
def fake_collectives(chosen: float, *, on_cpu: bool) -> Iterator[None]:
    """Inside, layers meet no other rank, and torch drops as it does on the planned device. chosen: as in EvenLoads."""
    before = token_dispatcher.HOST_COUNTS, ring.pass_on, chunked_loss.rows_of_chunks
    token_dispatcher.HOST_COUNTS, ring.pass_on = EvenLoads(chosen), pass_on
    chunked_loss.rows_of_chunks = few_chunks
    if not on_cpu:
        F.scaled_dot_product_attention, F.dropout = attention_of_gpu, dropout_of_gpu
    ForwardStream.meets_ranks = False
    tracker = get_rng_tracker()
    streams = tracker.get_states()
    unused = RNGState(seed=0, cpu=torch.get_rng_state(), gpu=None)  # nothing is drawn without values
    tracker.set_states({**dict.fromkeys(DROPOUT_STREAMS, unused), **streams})
    try:
        yield
    finally:
        tracker.set_states(streams)
        ForwardStream.meets_ranks = True
        token_dispatcher.HOST_COUNTS, ring.pass_on, chunked_loss.rows_of_chunks = before
        F.scaled_dot_product_attention, F.dropout = ATTENTION, DROPOUT

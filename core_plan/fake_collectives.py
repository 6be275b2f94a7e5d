"""Replacements for other ranks, for GPU kernels and for random streams while a model runs without values.

Experts have even loads, a ring has a neighbour, and there are random streams for dropout. Tensors without values are on
the CPU, whose kernels differ from a GPU's. With dropout, torch's CPU attention stores scores and dropout stores a mask
in the input's dtype. A CPU norm is several operators, and no CPU product of 16-bit values accumulates into fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.context_parallel import ring
from core.hugging_face.run.dropout import ForwardStream
from core.moe import token_dispatcher
from core.moe.token_dispatcher import HostCounts
from core.tensor_parallel import chunked_loss, layers
from core.tensor_parallel.random import DROPOUT_STREAMS, RNGState, get_rng_tracker


class EvenLoads(HostCounts):
    """Host counts in which every expert gets the same number of tokens.

    ``chosen`` is the fraction of experts per token.
    """

    def __init__(self, chosen: float) -> None:
        self.chosen = chosen
        self.rows_of_expert = 0  # from one rank, at the last call of `rows`

    def rows(self, choices: Tensor) -> tuple[Tensor, ...]:
        """Return empty indices for even loads."""
        self.rows_of_expert = math.ceil(choices.shape[0] * self.chosen)
        count = self.rows_of_expert * choices.shape[1]
        return tuple(torch.empty(count, dtype=torch.int64) for _ in range(2))

    def lists(self, counts: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return even loads in the shapes of the counts."""
        held_by, (ep, local), rows = counts.shape[0] - 2, counts.shape[1:], self.rows_of_expert
        return [rows * local] * ep, [rows * local] * ep, [rows * local * ep] * held_by, [rows * ep * held_by] * local

    def of_ranks(self, rows: int, group: Any, device: torch.device) -> list[int]:
        """Return the same number of rows for every rank."""
        return [rows] * int(group.size())

    def of_experts(self, choices: Tensor) -> list[int]:
        """Return the same number of tokens for every expert."""
        return [math.ceil(choices.shape[0] * self.chosen)] * choices.shape[1]


def pass_on(tensor: Tensor, group: Any) -> ring.Passing:
    """Return a placeholder for the tensor that a ring's neighbour would send."""
    return ring.Passing([group.send([tensor], 0)], tensor, torch.empty_like(tensor), group)


def attention_of_gpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute attention like a GPU kernel, whose dropout needs no memory. fp64 has no such kernel.

    The CPU kernel requires values as wide as queries, and GPU kernels do not: values are padded.
    """
    width, wide = value.shape[-1], query.shape[-1]
    if query.dtype != torch.float64:
        args = (*args[:1], *(0.0 for _ in args[1:2]), *args[2:])
        kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
    if width >= wide:
        return ATTENTION(query, key, value, *args, **kwargs)
    return ATTENTION(query, key, F.pad(value, (0, wide - width)), *args, **kwargs)[..., :width]


def dropout_of_gpu(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Apply dropout in one kernel, which stores one byte per element for backward."""
    if inplace or not training or p == 0:
        return DROPOUT(input, p, training, inplace)
    found: Tensor = torch.native_dropout(input, p, True)[0]
    return found


class NormOfGpu(torch.autograd.Function):
    """rms_norm as one kernel that stores its input and one number per row. Its operators move the same bytes."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        """Read the input, and write the output."""
        ctx.save_for_backward(input, input.new_empty(input.shape[:-1], dtype=torch.float32))
        return input * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Read both and write the input's gradient; read again for the weight's gradient."""
        input, _ = ctx.saved_tensors
        return grad + input, grad.flatten(0, -2).sum(dim=0)


def rms_norm_of_gpu(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Apply rms_norm like torch on a GPU, which has one kernel if input and weight have the same dtype."""
    if weight is None or weight.dtype != input.dtype:
        return RMS_NORM(input, normalized_shape, weight, eps)
    found: Tensor = NormOfGpu.apply(input, weight)
    return found


def add_product_of_gpu(main_grad: Tensor, grad: Tensor, input: Tensor) -> None:
    """Add a product of 16-bit values to fp32 in one kernel; a CPU multiplies two fp32 copies."""
    if main_grad.dtype == torch.float32 and grad.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(main_grad, grad.t(), input, out_dtype=torch.float32, out=main_grad)
    else:
        ADD_PRODUCT(main_grad, grad, input)


ATTENTION, DROPOUT, RMS_NORM = F.scaled_dot_product_attention, F.dropout, F.rms_norm  # torch's own
ADD_PRODUCT = layers.add_product


@contextmanager
def fake_collectives(chosen: float, *, on_cpu: bool) -> Iterator[None]:
    """Run layers inside without other ranks, with dropout as on the planned device. ``chosen`` is as in EvenLoads."""
    replaced: list[tuple[Any, str, Any]] = [
        (token_dispatcher, "HOST_COUNTS", EvenLoads(chosen)),
        (ring, "pass_on", pass_on),
        (ForwardStream, "meets_ranks", False),
    ]
    if not on_cpu:
        replaced += [
            (F, "scaled_dot_product_attention", attention_of_gpu),
            (F, "dropout", dropout_of_gpu),
            (F, "rms_norm", rms_norm_of_gpu),
            (layers, "add_product", add_product_of_gpu),
            (chunked_loss, "add_product", add_product_of_gpu),
        ]
    tracker = get_rng_tracker()
    streams = tracker.get_states()
    unused = RNGState(seed=0, cpu=torch.get_rng_state(), gpu=None)  # no random numbers are drawn without values
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.callback(tracker.set_states, streams)
        tracker.set_states({**dict.fromkeys(DROPOUT_STREAMS, unused), **streams})
        yield

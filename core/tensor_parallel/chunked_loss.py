"""Output layer and cross entropy over chunks of tokens, without materializing all logits.

Forward computes the logits of one chunk, saves three numbers per token and frees the logits; backward recomputes them.
This costs one more matmul with the output weight, but only one chunk of logits is ever in memory. Autograd sees a
single function, so the weight is all-gathered (ZeRO-3) and receives its gradient only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.groups.process_groups import ProcessGroups
from core.tensor_parallel.cross_entropy import check_target, largest_of_ranks
from core.tensor_parallel.layers import ColumnParallelLinear, add_product, main_grad_of
from core.tensor_parallel.mappings import (
    all_reduce,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    group_rank,
    group_size,
    resolve_groups,
)

WHOLE = 2**28  # logits with more elements (1 GiB in fp32) are computed in chunks by default
CHUNK = 2**26  # elements of a default chunk

Transform = Callable[[Tensor], Tensor]  # elementwise function on logits: a scale, a soft cap


def chunk_of(logits_chunk: int | None, tokens: int, columns: int) -> int:
    """Return the number of tokens per chunk, or 0 if the logits are computed in one piece.

    ``logits_chunk`` is the user's setting: ``None`` uses chunks above 2**28 elements, and 0 never does. ``columns`` is
    the width of this rank's logits.
    """
    if logits_chunk is None:
        return 0 if tokens * columns <= WHOLE else max(1, CHUNK // columns)
    return logits_chunk


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    chunk: int,
    *,
    bias: Tensor | None = None,
    transform: Transform | None = None,
    vocab_size: int | None = None,
    multiple: int = 1,
    gradient_accumulation_fusion: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    pg_collection: ProcessGroups | None = None,
) -> Tensor:
    """Compute the loss per token without materializing all logits.

    The result equals ``vocab_parallel_cross_entropy(transform(hidden @ weight.T + bias), target)``. This is a
    collective over the tensor-parallel group, with two small all-reduces for any number of chunks. The gradient of a
    16-bit weight is accumulated in fp32, and returned in fp32 if the parameter's ``grad_dtype`` is fp32.

    Args:
        hidden: [..., features], the same on all tensor-parallel ranks. Its gradient is a partial sum over the group.
        weight: [columns, features], this rank's rows of the vocabulary.
        target: [...], token ids in the full vocabulary, the same on all ranks.
        chunk: Number of tokens whose logits exist at a time.
        transform: Elementwise function that the model applies to its logits.
        gradient_accumulation_fusion: Add the weight gradient directly to ``weight.main_grad``, if it exists.

    Returns:
        Losses of shape [...].
    """
    if tp_group is None:
        tp_group = resolve_groups(pg_collection).tp
    if chunk < 1:
        raise ValueError(f"chunked_cross_entropy: chunk is {chunk}, expected at least 1 token")
    vocab_size = check_target(weight.shape[0], (*hidden.shape[:-1],), target, vocab_size, tp_group, multiple)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    losses: Tensor = _ChunkedCrossEntropy.apply(
        *(hidden.flatten(0, -2), weight, bias, target.flatten(), chunk),
        *(transform, gradient_accumulation_fusion, tp_group, vocab_size),
    )
    return losses.view(target.shape)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        chunk: int,
        transform: Transform | None,
        fuse: bool,
        group: dist.ProcessGroup | None,
        vocab_size: int,
    ) -> Tensor:
        columns, tokens = weight.shape[0], len(target)
        first = group_rank(group) * columns
        ctx.valid = min(max(vocab_size - first, 0), columns)  # columns that are no padding
        ctx.parameter, ctx.transform, ctx.fuse, ctx.chunk = weight, transform, fuse, chunk

        column = target - first
        elsewhere = (column < 0) | (column >= columns)
        column = column.masked_fill(elsewhere, 0)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        largest, sums, predicted = hidden.new_empty((3, tokens), dtype=dtype)
        for rows in rows_of_chunks(tokens, chunk):
            predicted[rows], largest[rows], sums[rows] = _numbers_of_tokens(
                *(hidden[rows], weight, bias, transform, column[rows], ctx.valid, dtype)
            )
        predicted.masked_fill_(elsewhere, 0.0)
        if group is not None and group_size(group) > 1:
            of_all = largest_of_ranks(largest, group)
            sums *= (largest - of_all).exp()
            sums, predicted = all_reduce(torch.stack([sums, predicted]), group)
            largest = of_all
        ctx.save_for_backward(hidden, weight, bias, column, elsewhere, largest, sums)
        return sums.log() - (predicted - largest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, column, elsewhere, largest, sums = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        main_grad = main_grad_of(ctx.parameter) if needs_weight and ctx.fuse else None
        grad_weight = _zeros_to_add_to(weight) if needs_weight and main_grad is None else main_grad
        grad_bias = _zeros_to_add_to(bias) if needs_bias else None
        hit = grad.masked_fill(elsewhere, 0.0).unsqueeze(1)
        for rows in rows_of_chunks(len(column), ctx.chunk):
            part = hidden[rows]
            grad_logits = _grad_of_logits(
                *(part, weight, bias, ctx.transform, column[rows], hit[rows], largest[rows], grad[rows] / sums[rows]),
                ctx.valid,
            )
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                add_product(grad_weight, grad_logits, part)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0, dtype=grad_bias.dtype)
            del grad_logits  # free this chunk's memory before the next chunk is computed
        given = None if grad_weight is None or main_grad is not None else _in_grad_dtype(grad_weight, ctx.parameter)
        return grad_hidden, given, None if grad_bias is None else grad_bias.to(bias.dtype), *[None] * 6


def rows_of_chunks(tokens: int, chunk: int) -> Iterator[slice]:
    """Yield the row slice of each chunk. The planner replaces all full chunks by one."""
    return (slice(begin, begin + chunk) for begin in range(0, tokens, chunk))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: Transform | None) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return logits if transform is None else transform(logits)


def _numbers_of_tokens(
    part: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transform: Transform | None,
    column: Tensor,
    valid: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's target logit, its largest logit, and the sum of exp(logit - largest).

    The logits are local to this function, so that two chunks of logits never exist at once.
    """
    logits = _logits(part, weight, bias, transform).to(dtype)
    logits[:, valid:] = -torch.inf
    predicted = logits.gather(1, column.unsqueeze(1)).squeeze(1)
    # A rank may hold padding alone, whose largest logit must not be infinite.
    largest = logits.amax(dim=1).clamp(min=torch.finfo(dtype).min)
    return predicted, largest, logits.sub_(largest.unsqueeze(1)).exp_().sum(dim=1)


def _grad_of_logits(
    part: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transform: Transform | None,
    column: Tensor,
    hit: Tensor,
    largest: Tensor,
    factor: Tensor,
    valid: int,
) -> Tensor:
    """Return the gradient of a chunk's logits before ``transform``: factor * exp(logit - largest), minus the hits."""
    raw = F.linear(part, weight, bias)
    with torch.enable_grad():
        raw.requires_grad_(transform is not None)
        logits = raw if transform is None else transform(raw)
    grad, of_dtype = logits.detach().to(largest.dtype), logits.dtype
    if transform is None:
        del raw, logits
    grad.sub_(largest.unsqueeze(1))
    grad[:, valid:] = -torch.inf
    grad.exp_().mul_(factor.unsqueeze(1)).scatter_add_(1, column.unsqueeze(1), -hit)
    grad = grad.to(of_dtype)
    if transform is not None:
        (grad,) = torch.autograd.grad(logits, raw, grad)
    return grad


def _zeros_to_add_to(parameter: Tensor) -> Tensor:
    """Allocate zeros in fp32 or wider to accumulate chunks, since 16 bits would round once per chunk."""
    return torch.zeros(
        parameter.shape, dtype=torch.promote_types(parameter.dtype, torch.float32), device=parameter.device
    )


def _in_grad_dtype(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Cast a gradient to the dtype in which autograd accumulates it."""
    return gradient.to(getattr(parameter, "grad_dtype", None) or parameter.dtype)


class OutputLayer(ColumnParallelLinear):
    """Output layer of a language model that can compute losses with chunked logits."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, *, target: Tensor | None = None, chunk: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Compute logits, or per-token losses [s, b] if ``target`` (token ids, [s, b]) is given.

        The result is a pair with the bias, as from ``ColumnParallelLinear.forward``. ``chunk`` limits the number of
        tokens whose logits exist at a time.
        """
        if target is None:
            return super().forward(input_, weight)
        weight = self.weight_for(weight)
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, self.tp_group) if self.tp_size > 1 else input_
        losses = chunked_cross_entropy(
            *(hidden, weight, target, chunk),
            bias=self.bias,
            vocab_size=self.output_size,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            pg_collection=ProcessGroups(tp=self.tp_group),  # without a group too, not parallel_state's
        )
        return losses, None

"""Cross entropy of logits that are split over tensor parallelism along the vocabulary, without gathering them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.groups.process_groups import ProcessGroups
from core.tensor_parallel.initialization import rows_on_rank
from core.tensor_parallel.mappings import all_reduce, group_rank, group_size, resolve_groups


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int | None = None,
    multiple: int = 1,
    pg_collection: ProcessGroups | None = None,
) -> Tensor:
    """Compute the cross entropy loss per token from vocabulary-parallel logits.

    The loss has the logits' dtype, or fp32 if that is wider. Only per-token maxima and sums are communicated, never
    logits. This is a collective over the tensor-parallel group.

    Args:
        vocab_parallel_logits (Tensor): [..., ceil(vocab_size / tp)], this rank's part of the vocabulary. On the last
            ranks, columns beyond ``vocab_size`` are padding and are ignored.
        target (Tensor): [...], token ids in the full vocabulary, the same on all ranks of the group.
        label_smoothing (float): Share of the target's weight that is spread evenly over the vocabulary, as in torch.
        tp_group (ProcessGroup): Tensor-parallel group. Defaults to the group in ``pg_collection``.
        pg_collection (ProcessGroups): Process groups. Defaults to those of ``parallel_state``, if initialized.
        vocab_size (int): Size of the full vocabulary, optional without tensor parallelism. It distinguishes this rank's
            part of the logits from gathered logits, whose loss would silently be too large by log(tp).
        multiple (int): This rank's columns are padded to a multiple of this number.

    Returns:
        Losses of shape [...].

    Raises:
        ValueError: If the logits do not have this rank's shape, if ``target`` does not match them, or if
            ``label_smoothing`` is not in [0, 1).
    """
    if tp_group is None:
        tp_group = resolve_groups(pg_collection).tp
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected 0 <= label_smoothing < 1")
    shape = vocab_parallel_logits.shape
    vocab_size = check_target(shape[-1], shape[:-1], target, vocab_size, tp_group, multiple)
    loss: Tensor = _VocabParallelCrossEntropy.apply(
        vocab_parallel_logits, target, label_smoothing, tp_group, vocab_size
    )
    return loss


def check_target(
    columns: int,
    shape: tuple[int, ...],
    target: Tensor,
    vocab_size: int | None,
    tp_group: dist.ProcessGroup | None,
    multiple: int = 1,
) -> int:
    """Check the target ids and this rank's number of columns, and return the vocabulary size.

    ``shape`` is the expected shape of ``target``. Raises ValueError if the columns, the shape or the ids do not match.
    """
    size = group_size(tp_group)
    if vocab_size is None:
        if size > 1:
            raise ValueError(
                f"vocab_parallel_cross_entropy over {size} tensor-parallel ranks needs vocab_size=: without it logits "
                "that were gathered look like this rank's part, and their loss would be silently wrong"
            )
        vocab_size = columns
    expected = rows_on_rank(vocab_size, size, multiple)
    if columns != expected:
        hint = ""
        if size > 1 and columns in (vocab_size, expected * size):
            hint = "; these are the logits of the whole vocabulary: build the output layer with gather_output=False"
        raise ValueError(
            f"vocab_parallel_cross_entropy: logits have {columns} columns, expected {expected} = vocab_size "
            f"{vocab_size} / {size} tensor-parallel ranks{hint}"
        )
    if target.shape != shape:
        raise ValueError(
            f"vocab_parallel_cross_entropy: target has shape {list(target.shape)}, expected {list(shape)}, the logits' "
            "shape without the last dimension"
        )
    # Looking at the values would stop a GPU's stream; there a target out of range counts as no token of any rank.
    if target.device.type == "cpu" and target.numel():
        lowest, highest = int(target.min()), int(target.max())
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(f"target ids are in [{lowest}, {highest}], expected 0 <= id < vocab_size {vocab_size}")
    return vocab_size


def largest_of_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the elementwise maximum over all ranks. Collective over the group."""
    return all_reduce(values, group, dist.ReduceOp.MAX)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy with two all-reduces: one for the maximum logit, one for all sums together.

    The sums are over exponentials, target logits and, with label smoothing, all logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, smoothing: float, group: dist.ProcessGroup | None, vocab_size: int
    ) -> Tensor:
        columns = logits.shape[-1]
        first = group_rank(group) * columns
        valid = min(max(vocab_size - first, 0), columns)  # columns that are no padding
        parallel = group_size(group) > 1

        dtype = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
        shifted = logits.to(dtype, copy=True)
        shifted[..., valid:] = -torch.inf
        largest = shifted.amax(dim=-1)
        if group is not None and parallel:
            largest = largest_of_ranks(largest, group)
        shifted -= largest.unsqueeze(-1)

        column = target - first
        elsewhere = (column < 0) | (column >= columns)
        column = column.masked_fill(elsewhere, 0)
        predicted = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        parts = [predicted]
        if smoothing:
            parts.append(shifted[..., :valid].sum(dim=-1))
        softmax = shifted.exp_()
        sums = torch.stack([softmax.sum(dim=-1), *parts])
        if group is not None and parallel:
            sums = all_reduce(sums, group)
        loss = sums[0].log() - (1.0 - smoothing) * sums[1]
        if smoothing:
            loss -= smoothing / vocab_size * sums[2]

        softmax /= sums[0].unsqueeze(-1)
        ctx.save_for_backward(softmax, column, elsewhere)
        ctx.smoothing, ctx.vocab_size, ctx.valid, ctx.dtype = smoothing, vocab_size, valid, logits.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        softmax, column, elsewhere = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        grad_logits = softmax * grad
        hit = grad.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        grad_logits.scatter_add_(-1, column.unsqueeze(-1), hit * (ctx.smoothing - 1.0))
        if ctx.smoothing:
            grad_logits[..., : ctx.valid] -= grad * (ctx.smoothing / ctx.vocab_size)
        return grad_logits.to(ctx.dtype), None, None, None, None

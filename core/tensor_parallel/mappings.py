"""Mappings between the regions of a tensor-parallel model: the collectives, and autograd around them.

A tensor is replicated over the group, split along its last dimension (heads, features), or split along its first
(the sequence). Each mapping's backward is its dual, itself a mapping, so gradients of gradients work too:

    copy_to <-> reduce_from,   scatter_to <-> gather_from,   gather_from_sequence <-> reduce_scatter_to_sequence

Activations are laid out [sequence, batch, hidden].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from core import parallel_state
from core.groups.process_groups import ProcessGroups
from core.model_parallel_config import ModelParallelConfig
from core.watch.waiting import complete, waiting

ACTIVATIONS = "an exchange of activations or of their gradients"  # what a rank waits for here

# torch 2.13 renames the flat collectives; 2.11 has only the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def resolve_groups(pg_collection: ProcessGroups | None) -> ProcessGroups:
    """The groups given, else those of parallel_state, else none at all: every axis has then one rank."""
    if pg_collection is not None:
        return pg_collection
    if parallel_state.model_parallel_is_initialized():
        return parallel_state.get_process_groups()
    return ProcessGroups()


def tensor_parallel_group(config: ModelParallelConfig, pg_collection: ProcessGroups | None) -> dist.ProcessGroup | None:
    """The tensor-parallel group; None where there is one rank. ValueError if the config was made for another size."""
    group = resolve_groups(pg_collection).tp
    if group_size(group) != config.tensor_model_parallel_size:
        raise ValueError(
            f"config.tensor_model_parallel_size is {config.tensor_model_parallel_size} and the tensor-parallel group "
            f"has {group_size(group)} ranks; call parallel_state.initialize_model_parallel with the same size, or pass "
            "pg_collection"
        )
    return group


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks of a group; no group is one rank."""
    return 1 if group is None else int(group.size())


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This rank's place in a group."""
    return 0 if group is None else int(group.rank())


def divide(numerator: int, denominator: int, what: str) -> int:
    """numerator / denominator; ValueError with the arithmetic when it is not whole."""
    if numerator % denominator:
        raise ValueError(f"{what}: {numerator} is not divisible by {denominator} (remainder {numerator % denominator})")
    return numerator // denominator


# -- collectives: each on one tensor, out of place, over a group of two or more ---------------------------------------


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The elementwise sum (or `op`) of every rank's tensor, in new memory."""
    return start_all_reduce(tensor, group, op).wait()


def start_all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Pending:
    """Begin the elementwise sum (or `op`) of every rank's tensor, in new memory."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    return Pending(dist.all_reduce(total, op=op, group=group, async_op=True), total, group)


@dataclass(slots=True)
class Pending:
    """A collective in flight; `wait()` completes it and gives its result."""

    work: dist.Work
    result: Tensor
    group: dist.ProcessGroup
    parts: Tensor | None = None  # [ranks, *result.shape]: what is left to add up

    def wait(self) -> Tensor:
        """The result, defined from here on."""
        with waiting(ACTIVATIONS, self.group):
            if self.result.is_cpu:
                complete(self.work, None)
            else:
                self.work.wait()
        return self.result if self.parts is None else torch.sum(self.parts, dim=0, out=self.result)


def start_gather_first(tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to concatenate every rank's [n, ...] to [n * size, ...]."""
    full = tensor.new_empty((tensor.shape[0] * group_size(group), *tensor.shape[1:]))
    return Pending(_all_gather(full, tensor.contiguous(), group=group, async_op=True), full, group)


def start_reduce_scatter_first(tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to sum [n * size, ...] over the group, leaving each rank its [n, ...]."""
    rows, size = _rows_of_a_rank(tensor, group), group_size(group)
    part = tensor.new_empty((rows, *tensor.shape[1:]))
    if tensor.device.type == "cpu":
        # gloo's reduce-scatter is an all-reduce plus copies; an exchange takes 0.6 (2 ranks) to 0.2 (4) of its time.
        parts = tensor.new_empty((size, *part.shape))
        work = dist.all_to_all_single(parts.view(tensor.shape), tensor.contiguous(), group=group, async_op=True)
        return Pending(work, part, group, parts)
    work = _reduce_scatter(part, tensor.contiguous(), op=dist.ReduceOp.SUM, group=group, async_op=True)
    return Pending(work, part, group)


def _rows_of_a_rank(tensor: Tensor, group: dist.ProcessGroup) -> int:
    what = f"first dimension (the sequence) of a {list(tensor.shape)} tensor, to be split over a tensor-parallel group"
    return divide(tensor.shape[0], group_size(group), what)


def gather_first(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's [n, ...] concatenated to [n * size, ...]."""
    return start_gather_first(tensor, group).wait()


def reduce_scatter_first(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's [n, ...] of the sum over the group of [n * size, ...]."""
    return start_reduce_scatter_first(tensor, group).wait()


def split_first(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's [n, ...] of a replicated [n * size, ...]."""
    rows, rank = _rows_of_a_rank(tensor, group), group_rank(group)
    return tensor[rank * rows : (rank + 1) * rows].contiguous()


def split_last(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's [..., n] of a replicated [..., n * size]."""
    size, rank = group_size(group), group_rank(group)
    columns = divide(tensor.shape[-1], size, f"last dimension of a {list(tensor.shape)} tensor to be split over a "
                     "tensor-parallel group")  # fmt: skip
    return tensor[..., rank * columns : (rank + 1) * columns].contiguous()


def gather_last(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's [..., n] concatenated to [..., n * size]."""
    return rearrange(gather_first(tensor.unsqueeze(0), group), "rank ... n -> ... (rank n)").contiguous()


# -- autograd --------------------------------------------------------------------------------------------------------


Mapping = type[torch.autograd.Function]


def mapping(collective: Callable[[Tensor, dist.ProcessGroup], Tensor], dual: Callable[[], Mapping]) -> Mapping:
    """A mapping by a collective of its group. dual: gives the mapping of the gradient, which is made later."""

    class Mapped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            return collective(tensor, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return dual().apply(grad, ctx.group), None

    return Mapped


# Replicated -> replicated, used by each rank in its own way: the gradients of the uses add up.
_Copy: Mapping = mapping(lambda tensor, group: tensor.view_as(tensor), lambda: _Reduce)
# Partial sums -> replicated.
_Reduce: Mapping = mapping(all_reduce, lambda: _Copy)
# Replicated -> split along the last dimension, and back.
_ScatterLast: Mapping = mapping(split_last, lambda: _GatherLast)
_GatherLast: Mapping = mapping(gather_last, lambda: _ScatterLast)
# Replicated -> split along the sequence.
_ScatterFirst: Mapping = mapping(split_first, lambda: _GatherFirstReplicated)
# Split along the sequence -> replicated, used by all ranks in the same way: gradients are equal, not partial.
_GatherFirstReplicated: Mapping = mapping(gather_first, lambda: _ScatterFirst)
# Split along the sequence -> whole, used by each rank in its own way: the gradients of the uses add up.
_GatherFirst: Mapping = mapping(gather_first, lambda: _ReduceScatterFirst)
# Partial sums of the whole sequence -> split along the sequence.
_ReduceScatterFirst: Mapping = mapping(reduce_scatter_first, lambda: _GatherFirst)


# -- public names. group: None for the tensor-parallel group of parallel_state; all ranks of the group call together --


def _map(function: Mapping, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        group = resolve_groups(None).tp
    mapped: Tensor = tensor if group_size(group) == 1 else function.apply(tensor, group)
    return mapped


def copy_to_tensor_model_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the input; its gradient is summed over the group."""
    return _map(_Copy, input_, group)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The input summed over the group; its gradient is unchanged."""
    return _map(_Reduce, input_, group)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's columns [..., n / size] of a replicated input; the gradient is gathered."""
    return _map(_ScatterLast, input_, group)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All columns [..., n * size]; each rank takes its columns of the gradient, which must be the same on all ranks."""
    return _map(_GatherLast, input_, group)


def scatter_to_sequence_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's positions [s / size, ...] of a replicated input; the gradient is gathered."""
    return _map(_ScatterFirst, input_, group)


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: dist.ProcessGroup | None = None
) -> Tensor:
    """All positions [s * size, ...].

    tensor_parallel_output_grad: what follows is tensor parallel, so each rank's gradient of the whole is partial and
    they are reduce-scattered. False: what follows is replicated, and each rank takes its own positions of the gradient.
    """
    return _map(_GatherFirst if tensor_parallel_output_grad else _GatherFirstReplicated, input_, group)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's positions [s / size, ...] of the sum over the group; the gradient is gathered."""
    return _map(_ReduceScatterFirst, input_, group)

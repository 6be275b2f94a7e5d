"""Mappings between the regions of a tensor-parallel model: collectives with their autograd functions.

A tensor is replicated over the group, split along its last dimension (heads, features), or split along its first
dimension (the sequence). The backward of each mapping is its dual mapping, so second-order gradients work too:

    copy_to <-> reduce_from,   scatter_to <-> gather_from,   gather_from_sequence <-> reduce_scatter_to_sequence

Activations have the layout [sequence, batch, hidden].
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

ACTIVATIONS = "an exchange of activations or of their gradients"  # named in reports of a rank that waits

# torch 2.13 renames the flat collectives; 2.11 has only the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def resolve_groups(pg_collection: ProcessGroups | None) -> ProcessGroups:
    """Return the given groups, or those of ``parallel_state``. Without either, every axis has one rank."""
    if pg_collection is not None:
        return pg_collection
    if parallel_state.model_parallel_is_initialized():
        return parallel_state.get_process_groups()
    return ProcessGroups()


def tensor_parallel_group(config: ModelParallelConfig, pg_collection: ProcessGroups | None) -> dist.ProcessGroup | None:
    """Return the tensor-parallel group, or ``None`` if there is only one rank.

    Raises ValueError if the config was created for a different tensor-parallel size.
    """
    group = resolve_groups(pg_collection).tp
    if group_size(group) != config.tensor_model_parallel_size:
        raise ValueError(
            f"config.tensor_model_parallel_size is {config.tensor_model_parallel_size} and the tensor-parallel group "
            f"has {group_size(group)} ranks; call parallel_state.initialize_model_parallel with the same size, or pass "
            "pg_collection"
        )
    return group


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return a group's size. ``None`` counts as one rank."""
    return 1 if group is None else int(group.size())


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return this rank's index in a group."""
    return 0 if group is None else int(group.rank())


def divide(numerator: int, denominator: int, what: str) -> int:
    """Return numerator / denominator. A remainder raises ValueError with the arithmetic and ``what`` the numerator
    is.
    """
    if numerator % denominator:
        raise ValueError(f"{what}: {numerator} is not divisible by {denominator} (remainder {numerator % denominator})")
    return numerator // denominator


# -- collectives: each on one tensor, out of place, over a group of two or more ---------------------------------------


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Return the elementwise sum (or ``op``) over all ranks in a new tensor."""
    return start_all_reduce(tensor, group, op).wait()


def start_all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Pending:
    """Start an all-reduce into a new tensor, leaving the input unchanged. Collective over two or more ranks."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    return Pending(dist.all_reduce(total, op=op, group=group, async_op=True), total, group)


@dataclass(slots=True)
class Pending:
    """Collective in flight. ``wait()`` completes it and returns its result."""

    work: dist.Work
    result: Tensor
    group: dist.ProcessGroup
    parts: Tensor | None = None  # [ranks, *result.shape], still to be summed

    def wait(self) -> Tensor:
        """Wait for the collective and return the result, which is undefined before this call."""
        with waiting(ACTIVATIONS, self.group):
            if self.result.is_cpu:
                complete(self.work, None)
            else:
                self.work.wait()
        return self.result if self.parts is None else torch.sum(self.parts, dim=0, out=self.result)


def start_gather_first(tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start an all-gather along the first dimension: [n, ...] per rank to [n * size, ...]. Collective over the
    group.
    """
    full = tensor.new_empty((tensor.shape[0] * group_size(group), *tensor.shape[1:]))
    return Pending(_all_gather(full, tensor.contiguous(), group=group, async_op=True), full, group)


def start_reduce_scatter_first(tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start a reduce-scatter along the first dimension: [n * size, ...] to this rank's [n, ...]. Collective over the
    group.
    """
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
    """All-gather along the first dimension: [n, ...] per rank to [n * size, ...]."""
    return start_gather_first(tensor, group).wait()


def reduce_scatter_first(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter along the first dimension: [n * size, ...] to this rank's [n, ...]."""
    return start_reduce_scatter_first(tensor, group).wait()


def split_first(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's [n, ...] of a replicated [n * size, ...]."""
    rows, rank = _rows_of_a_rank(tensor, group), group_rank(group)
    return tensor[rank * rows : (rank + 1) * rows].contiguous()


def split_last(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's [..., n] of a replicated [..., n * size]."""
    size, rank = group_size(group), group_rank(group)
    columns = divide(tensor.shape[-1], size, f"last dimension of a {list(tensor.shape)} tensor to be split over a "
                     "tensor-parallel group")  # fmt: skip
    return tensor[..., rank * columns : (rank + 1) * columns].contiguous()


def gather_last(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather along the last dimension: [..., n] per rank to [..., n * size]."""
    return rearrange(gather_first(tensor.unsqueeze(0), group), "rank ... n -> ... (rank n)").contiguous()


# -- autograd --------------------------------------------------------------------------------------------------------


Mapping = type[torch.autograd.Function]


def mapping(collective: Callable[[Tensor, dist.ProcessGroup], Tensor], dual: Callable[[], Mapping]) -> Mapping:
    """Create an autograd function of (tensor, group) from a collective and its dual, which is applied to the gradient.

    ``dual`` is a callable that returns the dual mapping, because that one is defined later.
    """

    class Mapped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            return collective(tensor, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return dual().apply(grad, ctx.group), None

    return Mapped


# Replicated -> replicated, used differently by each rank: gradients are summed.
_Copy: Mapping = mapping(lambda tensor, group: tensor.view_as(tensor), lambda: _Reduce)
# Partial sums -> replicated.
_Reduce: Mapping = mapping(all_reduce, lambda: _Copy)
# Replicated -> split along the last dimension, and back.
_ScatterLast: Mapping = mapping(split_last, lambda: _GatherLast)
_GatherLast: Mapping = mapping(gather_last, lambda: _ScatterLast)
# Replicated -> split along the sequence.
_ScatterFirst: Mapping = mapping(split_first, lambda: _GatherFirstReplicated)
# Split along the sequence -> replicated, used identically by all ranks: gradients are equal, not partial.
_GatherFirstReplicated: Mapping = mapping(gather_first, lambda: _ScatterFirst)
# Split along the sequence -> gathered, used differently by each rank: gradients are summed.
_GatherFirst: Mapping = mapping(gather_first, lambda: _ReduceScatterFirst)
# Partial sums of the full sequence -> split along the sequence.
_ReduceScatterFirst: Mapping = mapping(reduce_scatter_first, lambda: _GatherFirst)


# -- public names. group: None for the tensor-parallel group of parallel_state; all ranks of the group call together --


def _map(function: Mapping, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        group = resolve_groups(None).tp
    mapped: Tensor = tensor if group_size(group) == 1 else function.apply(tensor, group)
    return mapped


def copy_to_tensor_model_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the input unchanged and all-reduce its gradient, at the entry of a tensor-parallel region.

    All ranks of the group must run backward, because it communicates.

    Args:
        input_ (Tensor): Tensor that is the same on all ranks of the group.
        group (ProcessGroup, optional): Process group. Defaults to the tensor-parallel group of ``parallel_state``.
    """
    return _map(_Copy, input_, group)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All-reduce the input over the group and pass its gradient through unchanged, at the exit of a tensor-parallel
    region.

    All ranks of the group must call it.

    Args:
        input_ (Tensor): This rank's partial sum.
        group (ProcessGroup, optional): Process group. Defaults to the tensor-parallel group of ``parallel_state``.
    """
    return _map(_Reduce, input_, group)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return this rank's columns of a replicated input, and all-gather the gradient.

    All ranks of the group must run backward, because it communicates.

    Args:
        input_ (Tensor): [..., n], the same on all ranks of the group.
        group (ProcessGroup, optional): Process group. Defaults to the tensor-parallel group of ``parallel_state``.

    Returns:
        This rank's columns, [..., n / size].
    """
    return _map(_ScatterLast, input_, group)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All-gather the last dimension. Each rank keeps its own columns of the gradient.

    All ranks of the group must call it, and the gradient must be the same on all ranks.

    Args:
        input_ (Tensor): This rank's columns, [..., n].
        group (ProcessGroup, optional): Process group. Defaults to the tensor-parallel group of ``parallel_state``.

    Returns:
        All columns, [..., n * size].
    """
    return _map(_GatherLast, input_, group)


def scatter_to_sequence_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return this rank's positions of a replicated input, and all-gather the gradient.

    All ranks of the group must run backward, because it communicates.

    Args:
        input_ (Tensor): [s, ...], the same on all ranks of the group.
        group (ProcessGroup, optional): Process group. Defaults to the tensor-parallel group of ``parallel_state``.

    Returns:
        This rank's positions, [s / size, ...].
    """
    return _map(_ScatterFirst, input_, group)


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: dist.ProcessGroup | None = None
) -> Tensor:
    """All-gather the sequence dimension.

    All ranks of the group must call it.

    Args:
        input_ (Tensor): This rank's positions, [s, ...].
        tensor_parallel_output_grad (bool, optional): ``True`` if the following computation is tensor parallel. Each
            rank's gradient is then partial, and backward reduce-scatters it. ``False`` if the following computation is
            replicated; backward then keeps this rank's positions of the gradient.
        group (ProcessGroup, optional): Process group. Defaults to the tensor-parallel group of ``parallel_state``.

    Returns:
        All positions, [s * size, ...].
    """
    return _map(_GatherFirst if tensor_parallel_output_grad else _GatherFirstReplicated, input_, group)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce-scatter the input along the sequence, and all-gather the gradient.

    All ranks of the group must call it.

    Args:
        input_ (Tensor): This rank's partial sum of all positions, [s, ...].
        group (ProcessGroup, optional): Process group. Defaults to the tensor-parallel group of ``parallel_state``.

    Returns:
        This rank's positions of the sum, [s / size, ...].
    """
    return _map(_ReduceScatterFirst, input_, group)

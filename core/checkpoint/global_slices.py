"""Global slices: the position of this rank's parameters in the full model, in any layout.

A parameter's global name, shape and boxes do not depend on tensor, pipeline, data or expert parallel sizes. Layers and
experts are numbered over the full model, and a vocabulary is not padded. Checkpoints and ``verify`` use them.

A layer declares three facts that its tensors do not show:

    param.partition_length      the split dimension's length in the full model, if padding makes ranks store more
    param.expert_dim            the dimension along which a rank stacks its experts; ranks of 'ep' store different ones
    module.global_names         names of children or parameters in the full model:
                                core/groups/global_names.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from core.checkpoint.boxes import Box, Index, Split, split_boxes
from core.groups.global_names import global_name, is_numbered
from core.groups.param_attributes import copies_across_stages, data_group_of, embeddings_of
from core.groups.rank_grid import COPY_AXES, MODEL_AXES, axes_of


class AxisRanks(Protocol):
    """This rank's index on each parallel axis. Implemented by ProcessGroups."""

    def size(self, name: str) -> int:
        """Return the number of ranks of an axis."""

    def rank(self, name: str) -> int:
        """Return this rank's index on an axis."""


@dataclass(frozen=True, slots=True)
class GlobalSlice:
    """Position of one local tensor in the full model.

    Attributes:
        local_name: Name in the model chunk.
        name: Name in the full model.
        shape: Shape of the global tensor, without padding.
        boxes: Boxes of the global tensor stored here, empty if the local tensor is all padding.
        replica_axes: Groups over which ranks store the same boxes.
        replicas: Number of ranks that store the same boxes.
        replica: Index of this rank among the replicas.
        is_copy: True for a tied weight that another pipeline stage also stores, and writes.
    """

    local_name: str
    name: str
    shape: Index
    local_shape: Index
    boxes: tuple[Box, ...]
    replica_axes: tuple[str, ...]
    replicas: int
    replica: int
    is_copy: bool = False


def global_slices(module: nn.Module, places: AxisRanks) -> dict[str, GlobalSlice]:
    """Return the global slice of every parameter of an unwrapped model chunk, including frozen ones.

    Slices are keyed by the parameter's name in the chunk, in registration order. The call does not communicate. Raises
    ValueError, naming the parameter, if its tags contradict its shape.
    """
    embeddings = embeddings_of(module.modules())
    found = {}
    for local_name, param in module.named_parameters():
        crossing = copies_across_stages(param, embeddings)
        is_copy = bool(getattr(param, "shared", False)) or any(places.rank(axis) > 0 for axis in crossing)
        name = global_name(module, local_name)
        splits, replica_axes = _splits(module, local_name, param, places)
        found[local_name] = _slice(local_name, name, tuple(param.shape), splits, replica_axes, places, is_copy)
    return found


def buffer_slices(module: nn.Module, places: AxisRanks) -> dict[str, GlobalSlice]:
    """Return the global slices of persistent buffers, which are the same on all ranks of a pipeline stage."""
    kept = set(module.state_dict(keep_vars=True))
    within_stage = [axis for axis in MODEL_AXES if axis in COPY_AXES]
    return {
        name: _slice(name, global_name(module, name), tuple(buffer.shape), [], (*within_stage, "dp_cp"), places)
        for name, buffer in module.named_buffers()
        if name in kept
    }


def written_here(slices: Iterable[GlobalSlice]) -> set[str]:
    """Return the global names of tensors that this rank must write so that every box is written once.

    Replicas share the work. Ranks with the same boxes reach the same result without communication: tensors are assigned
    in order of decreasing size, each to the rank with the least load so far.
    """
    mine: set[str] = set()
    loads: dict[tuple[str, ...], list[int]] = {}
    for piece in sorted(slices, key=lambda piece: (-math.prod(piece.local_shape), piece.name)):
        if piece.is_copy:
            continue
        load = loads.setdefault(piece.replica_axes, [0] * piece.replicas)
        writer = load.index(min(load))
        load[writer] += math.prod(piece.local_shape)
        if writer == piece.replica:
            mine.add(piece.name)
    return mine


def _splits(
    module: nn.Module, local_name: str, param: torch.Tensor, places: AxisRanks
) -> tuple[list[Split], tuple[str, ...]]:
    """Return the splits of a parameter, and the groups over which ranks store the same part of it."""
    data_group = data_group_of(param)
    is_expert = data_group == "expt_dp"
    tp_axis = "expt_tp" if is_expert else "tp"
    copies = [axis.name for axis in axes_of(is_expert) if axis.name in COPY_AXES and axis.name != tp_axis]
    splits = []
    if is_expert and places.size("ep") > 1:
        expert_dim = getattr(param, "expert_dim", None)
        if expert_dim is not None:
            splits.append(Split(expert_dim, places.size("ep"), places.rank("ep")))
        elif not is_numbered(module, local_name):
            raise ValueError(
                f"parameter {local_name!r} is an expert's (allreduce=False), the {places.size('ep')} ranks of 'ep' "
                "hold different ones, and nothing says which. Set param.expert_dim to the dimension along which "
                "experts are stacked, or name them on a module: global_names = {'experts.0': 'experts.4'}"
            )
    if getattr(param, "tensor_model_parallel", False):
        dim = getattr(param, "partition_dim", None)
        if not isinstance(dim, int) or not 0 <= dim < param.dim():
            if places.size(tp_axis) > 1:
                raise ValueError(
                    f"parameter {local_name!r} is tensor_model_parallel and its partition_dim is {dim!r}; expected the "
                    f"dimension along which its ranks hold slices, 0 to {param.dim() - 1}"
                )
        else:
            splits.append(
                Split(
                    dim,
                    places.size(tp_axis),
                    places.rank(tp_axis),
                    getattr(param, "partition_stride", 1),
                    getattr(param, "partition_length", None),
                )
            )
        return splits, (*copies, data_group)
    return splits, (tp_axis, *copies, data_group)


def _slice(
    local_name: str,
    name: str,
    local_shape: Index,
    splits: list[Split],
    replica_axes: tuple[str, ...],
    places: AxisRanks,
    is_copy: bool = False,
) -> GlobalSlice:
    try:
        shape, boxes = split_boxes(local_shape, splits)
    except ValueError as error:
        raise ValueError(f"parameter {local_name!r}: {error}") from None
    replica, replicas = 0, 1
    for axis in replica_axes:
        replica = replica * places.size(axis) + places.rank(axis)
        replicas *= places.size(axis)
    return GlobalSlice(local_name, name, shape, local_shape, boxes, replica_axes, replicas, replica, is_copy)

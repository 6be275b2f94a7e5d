"""Pieces of a checkpoint: named tensors, of which each rank writes and reads boxes.

    model.<parameter or buffer>              as in the full model's state_dict
    optimizer.<state key>.<parameter>        'master', 'exp_avg', 'step', ...: the algorithm's own keys
    rng.<place>                              random streams of the rank at that place (bytes)

Names, shapes and boxes are global (core/checkpoint/global_slices.py), so they do not depend on a layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core import parallel_state
from core.checkpoint.boxes import Box, Index
from core.checkpoint.global_slices import GlobalSlice, buffer_slices, global_slices
from core.groups.global_names import global_name
from core.groups.process_groups import ProcessGroups

MODEL = "model"
OPTIMIZER = "optimizer"
RANDOM = "rng"


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Box of a tensor in the file, with the memory that it is written from or read into.

    Attributes:
        key: Name of the tensor in the file.
        shape: Shape of the global tensor.
        offset: Offset of the box in it.
        data: View of live or staging memory, with the shape of the box.
    """

    key: str
    shape: Index
    offset: Index
    data: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensor:
    """Parameter or buffer of one chunk, with its position in the full model.

    Attributes:
        chunk: Index of the model chunk.
        tensor: The local tensor. It has no values if ``shard`` is set.
        is_param: True for a parameter, False for a buffer.
        shard: For sharded parameters, the index of the first element stored by this rank, and the flat stored elements.
    """

    chunk: int
    slice: GlobalSlice
    tensor: Tensor
    is_param: bool
    shard: tuple[int, Tensor] | None = None

    @property
    def key(self) -> str:
        return f"{MODEL}.{self.slice.name}"


def groups_of(chunk: Any) -> ProcessGroups:
    """Return the process groups of a wrapped chunk, or for a bare module its own groups or those of parallel_state."""
    for name in ("groups", "pg_collection"):
        found = getattr(chunk, name, None)
        if isinstance(found, ProcessGroups):
            return found
    return parallel_state.get_process_groups() if parallel_state.is_initialized() else ProcessGroups()


def module_of(chunk: Any) -> nn.Module:
    """Return the chunk without its wrapper."""
    module: nn.Module = chunk.module if isinstance(getattr(chunk, "groups", None), ProcessGroups) else chunk
    return module


def local_tensors(chunks: Sequence[Any]) -> list[LocalTensor]:
    """Return all parameters and persistent buffers of this rank's chunks.

    Raises ValueError if two of them have the same name in the full model.
    """
    found: list[LocalTensor] = []
    for number, chunk in enumerate(chunks):
        module, groups = module_of(chunk), groups_of(chunk)
        params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        slices = global_slices(module, groups)
        shard_of = getattr(chunk, "param_shard", lambda param: None)
        for name, param in params.items():
            shard = shard_of(param)
            tensor = param.data if shard is None else param
            if param.numel() == 0:  # an empty shard would not show that the parameter exists
                shard, tensor = None, torch.empty(param.shape, dtype=param.dtype, device=param.device)
            found.append(LocalTensor(number, slices[name], tensor, True, shard))
        found += [
            LocalTensor(number, piece, buffers[name], False) for name, piece in buffer_slices(module, groups).items()
        ]
    seen: dict[str, LocalTensor] = {}
    for local in found:
        other = seen.setdefault(local.slice.name, local)
        if other is not local:
            raise ValueError(
                f"two tensors of this rank have the global name {local.slice.name!r}: {other.slice.local_name!r} of "
                f"chunk {other.chunk} and {local.slice.local_name!r} of chunk {local.chunk}. Set the stage modules' "
                f"names in the full model, for example module.global_names = {{'layers.0': 'layers.12'}}"
            )
    return found


def tied_names(chunks: Sequence[Any]) -> dict[str, str]:
    """Map the other names of shared parameters to their name in the file, all as in the full model."""
    found: dict[str, str] = {}
    for chunk in chunks:
        module = module_of(chunk)
        first = {id(param): name for name, param in module.named_parameters()}
        for name, param in module.named_parameters(remove_duplicate=False):
            if name != first[id(param)]:
                found[global_name(module, name)] = global_name(module, first[id(param)])
    return found


def box_view(tensor: Tensor, box: Box) -> Tensor:
    """Return a view of the elements of a local tensor that a box selects."""
    return tensor[tuple(slice(first, first + length) for first, length in zip(box.local_offset, box.size, strict=True))]


def model_pieces(tensors: Iterable[LocalTensor]) -> list[Piece]:
    """Return the pieces of the full model stored in these tensors."""
    return [
        Piece(local.key, local.slice.shape, box.global_offset, box_view(local.tensor, box))
        for local in tensors
        for box in with_empty(local.slice.boxes, local.slice.shape)
    ]


def with_empty(boxes: tuple[Box, ...], shape: Index) -> tuple[Box, ...]:
    """Add an empty box for a tensor without elements, so that the file still lists it."""
    zero = (0,) * len(shape)
    return boxes if math.prod(shape) else (Box(zero, zero, shape),)

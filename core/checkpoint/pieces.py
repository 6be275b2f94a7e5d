"""Pieces of a checkpoint: named tensors, of which each rank writes and reads boxes.

    model.<parameter or buffer>              as in the whole model's state_dict
    optimizer.<state key>.<parameter>        'master', 'exp_avg', 'step', ...: the algorithm's own keys
    rng.<place>                              random streams of the rank at that place (bytes)

Names, shapes and boxes are global (core/checkpoint/global_slices.py), so no layout is left in them.
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
from core.distributed.contract.global_names import global_name
from core.groups.process_groups import ProcessGroups

MODEL = "model"
OPTIMIZER = "optimizer"
RANDOM = "rng"


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One box of a tensor in the file, and the memory that it is written from or read into.

    shape: of the whole tensor. offset: of the box in it. data: [the box's size], a view of live or of staging memory.
    """

    key: str
    shape: Index
    offset: Index
    data: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensor:
    """A parameter or buffer of one chunk, and what it is in the whole model.

    shard: where parameters are sharded, the first element that this rank keeps, and the elements from there on, flat;
    `tensor` then has no values.
    """

    chunk: int
    slice: GlobalSlice
    tensor: Tensor
    is_param: bool
    shard: tuple[int, Tensor] | None = None

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{MODEL}.{self.slice.name}"


def groups_of(chunk: Any) -> ProcessGroups:
    """The groups of a wrapped chunk; of a bare module those that it or parallel_state has."""
    for name in ("groups", "pg_collection"):
        found = getattr(chunk, name, None)
        if isinstance(found, ProcessGroups):
            return found
    return parallel_state.get_process_groups() if parallel_state.is_initialized() else ProcessGroups()


def module_of(chunk: Any) -> nn.Module:
    """The chunk without its wrapper."""
    module: nn.Module = chunk.module if isinstance(getattr(chunk, "groups", None), ProcessGroups) else chunk
    return module


def local_tensors(chunks: Sequence[Any]) -> list[LocalTensor]:
    """All parameters and persistent buffers of this rank's chunks. Local.

    Raises ValueError where two of them have one name in the whole model.
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
            if param.numel() == 0:  # a rank's shard of it would not show that it is there
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
                f"two tensors of this rank are both {local.slice.name!r} in the whole model: "
                f"{other.slice.local_name!r} of chunk {other.chunk} and {local.slice.local_name!r} of chunk "
                f"{local.chunk}. Say what the parts of a stage are called in the whole model: "
                "module.global_names = {'layers.0': 'layers.12'}"
            )
    return found


def tied_names(chunks: Sequence[Any]) -> dict[str, str]:
    """Other names of parameters that modules share -> the name that each has in the file; names of the whole model."""
    found: dict[str, str] = {}
    for chunk in chunks:
        module = module_of(chunk)
        first = {id(param): name for name, param in module.named_parameters()}
        for name, param in module.named_parameters(remove_duplicate=False):
            if name != first[id(param)]:
                found[global_name(module, name)] = global_name(module, first[id(param)])
    return found


def box_view(tensor: Tensor, box: Box) -> Tensor:
    """The elements of a local tensor that a box names, in place."""
    return tensor[tuple(slice(first, first + length) for first, length in zip(box.local_offset, box.size, strict=True))]


def model_pieces(tensors: Iterable[LocalTensor]) -> list[Piece]:
    """The boxes that these tensors hold of the whole model."""
    return [
        Piece(local.key, local.slice.shape, box.global_offset, box_view(local.tensor, box))
        for local in tensors
        for box in with_empty(local.slice.boxes, local.slice.shape)
    ]


def with_empty(boxes: tuple[Box, ...], shape: Index) -> tuple[Box, ...]:
    """A tensor without elements has no box, and is still to be found in the file: it gets an empty one."""
    zero = (0,) * len(shape)
    return boxes if math.prod(shape) else (Box(zero, zero, shape),)

"""Optimizer state as pieces: a rank's flat ranges of parameters converted to boxes of global parameters.

A rank's entry covers elements [offset, offset + numel) of a flattened local parameter. These are a few boxes of the
local parameter, and so of the global one. The file does not depend on buckets, runs or shards.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.checkpoint.boxes import cut_to_range, row_strides
from core.checkpoint.global_slices import written_here
from core.checkpoint.pieces import OPTIMIZER, LocalTensor, Piece, groups_of, module_of

WEIGHTS = "master"
INSTANCES = {"dp_cp": "inter_dp_cp", "expt_dp": "inter_expt_dp"}  # axes of ranks that own the same shard


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """Range of one local parameter in one optimizer, with its state.

    Attributes:
        name: The optimizer's name of the parameter.
        offset: First element of the range in the flattened local parameter.
        state: Values by key: flat tensors [numel], and numbers.
        elements: Keys of the flat tensors.
    """

    optimizer: Any
    name: str  # the optimizer's name, with the chunk number if there are several chunks
    local: LocalTensor
    offset: int
    numel: int
    state: dict[str, Any]
    elements: Collection[str] = ()

    @property
    def holds_first(self) -> bool:
        """True if this range contains the global parameter's first element. That rank writes the step counts."""
        boxes = cut_to_range(
            self.local.slice.boxes, self.local.slice.local_shape, self.offset, self.offset + self.numel
        )
        return any(not any(box.global_offset) for box in boxes)

    def key(self, state_key: str) -> str:
        return f"{OPTIMIZER}.{state_key}.{self.local.slice.name}"


def leaves(optimizer: Any) -> list[Any]:
    """Return the optimizers inside a chained optimizer.

    An optimizer that is not chained, or chains itself, is one leaf.
    """
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None or optimizer in chained:
        return [] if optimizer is None else [optimizer]
    return [leaf for child in chained for leaf in leaves(child)]


def entries_of(optimizer: Any, chunks: Sequence[Any], tensors: Sequence[LocalTensor]) -> list[Entry]:
    """Return every range that this rank's optimizers own, with its live state.

    Raises ValueError if an optimizer's state has no names, or belongs to a parameter outside ``chunks``.
    """
    from core.optimizer.optimizer_state import PLACE, elements_of

    by_param = {id(param): local for param, local in _params(chunks, tensors)}
    found = []
    for leaf in leaves(optimizer):
        if not hasattr(leaf, "state_by_parameter"):
            raise ValueError(
                f"optimizer is a {type(leaf).__name__}, whose state has no names; make it with "
                "core.optimizer.get_megatron_optimizer, which takes any torch.optim class"
            )
        by_name = {name: by_param[key] for key, name in leaf.names.items() if key in by_param}
        for name, ranges in leaf.state_by_parameter().items():
            if name not in by_name:
                raise ValueError(
                    f"the optimizer holds state of {name!r}, which is no parameter of the model chunks that were passed"
                )
            for entry in ranges:
                state = {key: value for key, value in entry.items() if key not in PLACE and value is not None}
                place = entry["offset"], entry["numel"]
                found.append(Entry(leaf, name, by_name[name], *place, state, elements_of(entry)))
    return found


def _params(chunks: Sequence[Any], tensors: Sequence[LocalTensor]) -> Iterator[tuple[Any, LocalTensor]]:
    by_name = {(local.chunk, local.slice.local_name): local for local in tensors if local.is_param}
    for number, chunk in enumerate(chunks):
        for name, param in module_of(chunk).named_parameters():
            yield param, by_name[number, name]


def written_entries(entries: Sequence[Entry], chunks: Sequence[Any], tensors: Sequence[LocalTensor]) -> list[Entry]:
    """Select the entries that this rank writes, so that each range is written once.

    All ranks apply the same rule without communication. Replicated state is assigned like the parameters. A shard is on
    one data rank already. Other ranks may store it too (tensor-parallel ranks of a replicated parameter, other
    optimizer instances); a hash of its name selects one of them.
    """
    replicated = written_here(local.slice for local in tensors if local.is_param)
    return [entry for entry in entries if _writes(entry, chunks[entry.local.chunk], replicated)]


def _writes(entry: Entry, chunk: Any, replicated: set[str]) -> bool:
    piece = entry.local.slice
    if not chunk.ddp_config.sharded:
        return piece.name in replicated
    groups = groups_of(chunk)
    replica, replicas = 0, 1
    for axis in (INSTANCES.get(axis, axis) for axis in piece.replica_axes):
        if axis in INSTANCES.values() and chunk.ddp_config.num_distributed_optimizer_instances == 1:
            continue
        replica, replicas = replica * groups.size(axis) + groups.rank(axis), replicas * groups.size(axis)
    return not piece.is_copy and zlib.crc32(piece.name.encode()) % replicas == replica


def entry_pieces(entry: Entry, state_key: str, flat: Tensor, key: str | None = None) -> list[Piece]:
    """Return the boxes of a flat tensor, [numel], that covers an entry's range.

    ``key`` is the name in the file, by default the entry's own name for ``state_key``.
    """
    piece = entry.local.slice
    strides = row_strides(piece.local_shape)
    return [
        Piece(
            entry.key(state_key) if key is None else key,
            piece.shape,
            box.global_offset,
            flat.as_strided(
                box.size,
                strides,
                flat.storage_offset() + sum(map(operator.mul, box.local_offset, strides)) - entry.offset,
            ),
        )
        for box in cut_to_range(piece.boxes, piece.local_shape, entry.offset, entry.offset + entry.numel)
    ]


def sharded_weights(tensors: Sequence[LocalTensor]) -> list[Entry]:
    """Return the ranges of sharded parameters that this rank stores, as entries without an optimizer."""
    return [
        Entry(None, local.slice.name, local, local.shard[0], local.shard[1].numel(), {WEIGHTS: local.shard[1]})
        for local in tensors
        if local.shard is not None and local.shard[1].numel() > 0
    ]


def optimizer_pieces(entries: Sequence[Entry]) -> list[Piece]:
    """Return the pieces of these entries: tensors along the parameters, and numbers once per parameter.

    Raises ValueError, naming the parameter and the key, if a state value is neither.
    """
    pieces = []
    for entry in entries:
        for key, value in entry.state.items():
            if "." in key:
                raise ValueError(f"optimizer state {key!r} of {entry.name!r}: its key must not hold a dot")
            if is_number(value):
                if entry.holds_first:
                    pieces.append(Piece(entry.key(key), (), (), as_scalar(value)))
            elif key in entry.elements:
                pieces += entry_pieces(entry, key, value.detach().contiguous())
            else:
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"optimizer state {key!r} of {entry.name!r} is {shape}; a checkpoint that loads at any layout "
                    f"holds one value an element ({entry.numel} here) or one number a parameter"
                )
    return pieces


def as_scalar(value: Any) -> Tensor:
    """Convert a number to a 0-dim tensor that represents it exactly."""
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")


def is_number(value: Any) -> bool:
    """Return ``True`` if a state value is one number for the whole parameter, such as a step count."""
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.dim() == 0)

"""Megatron's checkpoints (torch_dist) of a GPT, mapped to the tensor names of this package.

Layers are stacked in these files, or numbered if they were saved with singleton_local_shards. A layer norm may be named
after the linear layer that follows it. Optimizer states are named with a prefix and the weight's name. They have the
weight's shape (fully_reshardable) or store each rank's slice flat (fully_sharded_model_space). While a pickle is read,
unknown classes are replaced by inert ones, so none of its code runs.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from core.checkpoint.boxes import Box, meet
from core.checkpoint.errors import CheckpointError
from core.checkpoint.load_plan import LoadPlan, plan_load
from core.checkpoint.optimizer_pieces import WEIGHTS
from core.checkpoint.pieces import MODEL, OPTIMIZER, Piece, box_view, local_tensors

Records = Mapping[str, TensorStorageMetadata]

COMMON_FILE, INDEX_FILE = "common.pt", ".metadata"
RENAMED = (
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
    (r"\.mlp\.experts\.(weight|bias)([12])$", r".mlp.experts.experts.linear_fc\2.\1"),
)
BACK = (
    (r"(linear_fc1.*)_[wv]$", r"\1"),
    (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
    (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
    (r"\.mlp\.experts\.experts\.linear_fc([12])\.(weight|bias)$", r".mlp.experts.\2\1"),
)
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # may be padded in the file
MOST_PADDING = 128 * 64  # rows: Megatron pads to a multiple of 128 times the tensor-parallel size
STATE = re.compile(r"((?:chained_\d+\.)?optimizer\.state\.)(\w+)\.")  # prefix of a weight's name
MASTERS = ("param", "fp32_param")
PLAIN = {
    "argparse": ("Namespace",),
    "builtins": ("set", "frozenset", "slice", "complex", "bytearray"),
    "collections": ("OrderedDict",),
    "torch": ("device", "Size"),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.serialization": ("_get_layout",),
}


class _Inert:
    """Placeholder for an object of a class that is not instantiated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> _Inert:
        return self

    __setstate__ = __setitem__ = append = extend = __init__


class Unpickler(pickle.Unpickler):
    """Unpickler for plain values, tensors and an index of torch.distributed.checkpoint. All other objects are inert."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class, or an inert one that runs no code chosen by the file."""
        if name in PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _member_of if (module, name) == ("builtins", "getattr") else _Inert


def _member_of(kind: Any, name: str) -> Any:
    """Replace ``getattr``, by which some versions of Python 3.11 pickle a member of an Enum."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    return _Inert()


def is_megatrons(directory: Path) -> bool:
    """Return ``True`` if Megatron's dist_checkpointing wrote the directory."""
    return (directory / INDEX_FILE).is_file() and (directory / COMMON_FILE).is_file()


class MegatronReader(FileSystemReader):
    """Reader for tensors and blobs of a directory written by Megatron."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / INDEX_FILE).open("rb") as file:
            found = Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{self.path}/{INDEX_FILE} is no index of torch.distributed.checkpoint")
        return found

    def common(self) -> Any:
        """Return the plain values. Objects of classes outside Python and torch are removed."""
        found = torch.load(Path(self.path) / COMMON_FILE, "cpu", _PickleModule, weights_only=False)
        return _without_inert(found)


class _PickleModule:
    """Pickle module in the form that torch.load expects. ``load`` is for files older than the zip format."""

    Unpickler = Unpickler

    @staticmethod
    def load(file: Any, **unused: Any) -> Any:
        return Unpickler(file).load()


def _without_inert(value: Any) -> Any:
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**_without_inert(vars(value)))
    if isinstance(value, dict):
        kept = {key: _without_inert(part) for key, part in value.items() if not isinstance(part, (_Inert, type))}
        return collections.OrderedDict(kept) if isinstance(value, collections.OrderedDict) else kept
    return [_without_inert(part) for part in value] if isinstance(value, list) else value


def pieces_in(piece: Piece, records: Records) -> list[Piece]:
    """Return the pieces of the file's tensors that have the values of a global box, or [] if the file lacks them."""
    for name in dict.fromkeys((piece.key, _renamed(piece.key, RENAMED))):
        layer = re.fullmatch(r"(.*\.layers)\.(\d+)(\..*)", name)
        stacked = "" if layer is None else f"{layer[1]}{layer[3]}"
        if name in records:
            return _cut(Piece(name, _padded(name, piece.shape, records), piece.offset, piece.data), records)
        if layer is not None and stacked in records:
            shape = (records[stacked].size[0], *piece.shape)
            return _cut(Piece(stacked, shape, (int(layer[2]), *piece.offset), piece.data.unsqueeze(0)), records)
        if f"{name}_w" in records:
            halves = (_half(piece, number, f"{name}{end}") for number, end in enumerate(("_w", "_v")))
            return [part for half in halves for whole in half for part in _cut(whole, records)]
    return []


def _cut(piece: Piece, records: Records) -> list[Piece]:
    """Split a box into contiguous runs if the file stores each rank's slice flat, else return it unchanged.

    Flat tensors have shape [slices along each axis, elements].
    """
    *slices, elements = records[piece.key].size or [0]
    size = [whole // parts for whole, parts in zip(piece.shape, slices, strict=False)]  # size of one slice
    if [n * parts for n, parts in zip(size, slices, strict=False)] != [*piece.shape] or math.prod(size) != elements:
        return [piece]  # a different shape is rejected later
    own = Box(tuple(piece.offset), (0,) * len(size), tuple(piece.data.shape))
    found = []
    for place in itertools.product(*map(range, slices)):
        first = [number * n for number, n in zip(place, size, strict=True)]  # offset of the slice in the global tensor
        met = meet(own, tuple(begin - at for begin, at in zip(first, piece.offset, strict=True)), tuple(size))
        if met is None:
            continue
        part = box_view(piece.data, met)
        # Trailing axes that are contiguous in the file and in memory are read at once; leading axes are looped over.
        whole = [size[d + 1 :] == [*met.size[d + 1 :]] and part[(0,) * d].is_contiguous() for d in range(len(size))]
        depth = whole.index(True)
        for at in itertools.product(*map(range, met.size[:depth])):
            steps = itertools.zip_longest(met.global_offset, first, at, fillvalue=0)
            run, inside = part[at].view(*[1] * len(size), -1), [start - begin + step for start, begin, step in steps]
            found.append(Piece(piece.key, (*slices, elements), (*place, int(np.ravel_multi_index(inside, size))), run))
    return found


def _renamed(key: str, rows: Iterable[tuple[str, str]]) -> str:
    for before, after in rows:
        key = re.sub(before, after, key)
    return key


def weights_in(records: Records) -> dict[str, list[tuple[str, int | None]]]:
    """Map each weight name, after 'model.', to the stored parts to concatenate: (stored name, layer index or None)."""
    found: dict[str, list[tuple[str, int | None]]] = {}
    # A gate ('_w') comes before its value ('_v').
    for key in sorted((key for key in records if STATE.match(key) is None), reverse=True):
        name = f"{MODEL}.{_renamed(key, BACK)}"
        stacked = re.search(r"\.layers\.(?!\d)", name)
        for layer in range(records[key].size[0]) if stacked else (None,):
            own = name if stacked is None else f"{name[: stacked.end()]}{layer}.{name[stacked.end() :]}"
            found.setdefault(own, []).append((key, layer))
    return dict(sorted(found.items()))


def _padded(name: str, shape: tuple[int, ...], records: Records) -> tuple[int, ...]:
    """Return the shape in the file, in which a vocabulary may have additional rows."""
    size = records[name].size
    if not name.endswith(VOCABULARY):
        return shape
    flat = len(size) == len(shape) + 1
    rows = size[0] * size[-1] * math.prod(size[1:-1]) // math.prod(shape[1:]) if flat else size[0]
    return (rows, *shape[1:]) if shape[0] < rows < shape[0] + MOST_PADDING else shape


def layers_of(pieces: Iterable[Piece]) -> set[tuple[str, int]]:
    """Return the requested (name of a stacked tensor, layer index) pairs."""
    stacked = [piece for piece in pieces if piece.shape and re.search(r"\.layers\.(?!\d)", piece.key)]
    return {(p.key, p.offset[0] + layer) for p in stacked for layer in range(p.data.shape[0])}


def layers_lacking(requested: set[tuple[str, int]], records: Records) -> str | None:
    """Return an error text if the file has more layers than all ranks of the model together, else ``None``."""
    for key in sorted({key for key, _ in requested}):
        here, there = sum(key == other for other, _ in requested), records[key].size[0]
        if here < there:
            return f"{key!r} has {there} layers in the file and the model {here}; build the model that was saved"
    return None


def _half(piece: Piece, number: int, key: str) -> list[Piece]:
    """Return the part of a gated weight that belongs to its gate (0) or value (1), stored as separate tensors."""
    half, begin = piece.shape[0] // 2, piece.offset[0]
    first, last = max(begin, number * half), min(begin + piece.data.shape[0], (number + 1) * half)
    place = (first - number * half, *piece.offset[1:])
    return (
        [Piece(key, (half, *piece.shape[1:]), place, piece.data[first - begin : last - begin])] if first < last else []
    )


# -- an optimizer's states -------------------------------------------------------------------------------------------


def plan_states(optimizer: Any, records: Records, blobs: Iterable[str], common: Any) -> LoadPlan:
    """Plan this rank's reads of an optimizer and its model chunks: master weights, moments and steps.

    ``blobs`` are the names of the file's non-tensor objects, and ``common`` the plain values of its common.pt. Raises
    CheckpointError if there are no optimizer states, or only the layout that wrote them can read them.
    """
    kinds = {(match[1], match[2]) for match in map(STATE.match, records) if match is not None}
    steps = _steps_in(common.get("optimizer", {}))
    if not kinds:
        raise CheckpointError(_unreadable(records, blobs))
    if len(steps) != 1 and any(kind not in MASTERS for _, kind in kinds):
        raise CheckpointError(
            f"its common.pt has the step counts {sorted(steps)} of the optimizer, and one is needed; leave the "
            "optimizer out of the tree, and begin with the weights"
        )
    index: dict[str, Any] = {}
    theirs: dict[str, str] = {}
    read_names: set[str] = set()
    for local in local_tensors(optimizer.model_chunks):
        name, shape = local.slice.name, local.slice.shape
        keys = [(local.key, name)]
        for at, kind in kinds if local.is_param else ():
            keys.append((f"{OPTIMIZER}.{WEIGHTS if kind in MASTERS else kind}.{name}", f"{at}{kind}.{name}"))
        for ours, key in keys:
            parts = pieces_in(Piece(key, shape, (0,) * len(shape), torch.empty(shape, device="meta")), records)
            if parts:
                theirs[ours], index[ours] = key, _record(records[parts[0].key].properties.dtype, shape)
                read_names |= {part.key for part in parts}
        index |= {f"{OPTIMIZER}.step.{name}": _record(torch.float32, ()) for _ in steps}
    plan = plan_load(optimizer.model_chunks, optimizer, Metadata(index), {})
    plan.used = read_names  # names in the file, including master weights, which a full-precision model does not read
    requested, plan.pieces = plan.pieces, []
    for piece in requested:
        if piece.key in theirs:
            plan.pieces += pieces_in(replace(piece, key=theirs[piece.key]), records)
        else:
            piece.data.fill_(min(steps))
    return plan


def _record(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [whole])


def _steps_in(tree: Any) -> set[int]:
    """Collect every step count among an optimizer's plain values."""
    if isinstance(tree, Mapping):
        own = {
            int(tree[key]) for key in ("step", "common_step") if isinstance(tree.get(key), (int, float, torch.Tensor))
        }
        return own.union(*map(_steps_in, tree.values()))
    return set().union(*map(_steps_in, tree)) if isinstance(tree, list) else set()


def _unreadable(records: Records, blobs: Iterable[str]) -> str:
    kind = "dp_reshardable" if any(".gbuf_idx_" in key for key in records) else None
    kind = "dp_zero_gather_scatter" if any(".param_state" in key for key in blobs) else kind
    if kind is None:
        return "it holds no optimizer state; leave the optimizer out of the tree, and begin with the weights"
    return (
        f"its optimizer state is {kind}, which only the layout that wrote it can read; load it there with Megatron and "
        "save with --dist-ckpt-optim-fully-reshardable, or leave the optimizer out of the tree"
    )

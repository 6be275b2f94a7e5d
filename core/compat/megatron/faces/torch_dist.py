"""Megatron's own checkpoints (torch_dist) of a GPT: which tensor of their files a part of ours is.

Layers are stacked in them, or numbered where they were saved with singleton_local_shards; a layer norm may have the
name of the linear layer behind it. A pickle's classes are replaced by ones that do nothing, so no code of it runs.
"""

from __future__ import annotations

import argparse
import collections
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from core.checkpoint import CheckpointError
from core.checkpoint.index import IndexUnpickler
from core.checkpoint.pieces import Piece

COMMON_FILE, INDEX_FILE = "common.pt", ".metadata"
RENAMED = (
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
    (r"\.mlp\.experts\.(weight|bias)([12])$", r".mlp.experts.experts.linear_fc\2.\1"),
)
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # may be padded in the file
MOST_PADDING = 128 * 64  # rows: Megatron pads to a multiple of 128 times the tensor-parallel size
PLAIN = {
    "argparse": ("Namespace",),
    "builtins": ("set", "frozenset", "slice", "complex", "bytearray"),
    "collections": ("OrderedDict",),
    "torch": ("device",),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter"),
    "torch.distributed.checkpoint.metadata": ("StorageMeta",),
}


class _Inert:
    """Stands for an object of a class that is not made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> _Inert:
        return self

    __setstate__ = __setitem__ = append = extend = __init__


class Unpickler(IndexUnpickler):
    """Makes plain values, tensors and an index of torch.distributed.checkpoint; anything else is inert."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that runs no code of the file's choice."""
        if name in PLAIN.get(module, ()):
            return pickle.Unpickler.find_class(self, module, name)
        try:
            return super().find_class(module, name)
        except pickle.UnpicklingError:
            return _Inert


def is_megatrons(directory: Path) -> bool:
    """True for a directory that Megatron's dist_checkpointing has written."""
    return (directory / INDEX_FILE).is_file() and (directory / COMMON_FILE).is_file()


class MegatronReader(FileSystemReader):
    """Reads tensors and blobs of such a directory."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        with (Path(self.path) / INDEX_FILE).open("rb") as file:
            found = Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{self.path}/{INDEX_FILE} is no index of torch.distributed.checkpoint")
        return found

    def common(self) -> Any:
        """The plain values, without those of other classes than Python's and torch's own."""
        found = torch.load(Path(self.path) / COMMON_FILE, "cpu", _PickleModule, weights_only=False)
        return _without_inert(found)


class _PickleModule:
    """What torch.load asks of a module that unpickles; `load` for files of before the zip format."""

    Unpickler = Unpickler

    @staticmethod
    def load(file: Any, **unused: Any) -> Any:
        """One object."""
        return Unpickler(file).load()


def _without_inert(value: Any) -> Any:
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**_without_inert(vars(value)))
    if isinstance(value, dict):
        kept = {key: _without_inert(part) for key, part in value.items() if not isinstance(part, (_Inert, type))}
        return collections.OrderedDict(kept) if isinstance(value, collections.OrderedDict) else kept
    return [_without_inert(part) for part in value] if isinstance(value, list) else value


def pieces_in(leaf: Any, data: Tensor, records: Mapping[str, TensorStorageMetadata]) -> list[Piece]:
    """Where the values of a ShardedTensor are in the file; [] where it does not have them."""
    piece = leaf.piece(data)
    for name in dict.fromkeys((piece.key, _renamed(piece.key))):
        layer = re.fullmatch(r"(.*\.layers)\.(\d+)(\..*)", name)
        stacked = "" if layer is None else f"{layer[1]}{layer[3]}"
        if name in records:
            return [Piece(name, _padded(name, piece.shape, records), piece.offset, piece.data)]
        if layer is not None and stacked in records:
            shape = (records[stacked].size[0], *piece.shape)
            return [Piece(stacked, shape, (int(layer[2]), *piece.offset), piece.data.unsqueeze(0))]
        if f"{name}_w" in records:
            return [part for start, end in ((0, "_w"), (1, "_v")) for part in _half(piece, start, f"{name}{end}")]
    return []


def _renamed(key: str) -> str:
    for ours, theirs in RENAMED:
        key = re.sub(ours, theirs, key)
    return key


def _padded(name: str, shape: tuple[int, ...], records: Mapping[str, TensorStorageMetadata]) -> tuple[int, ...]:
    rows = records[name].size[0] if name.endswith(VOCABULARY) else 0
    return (rows, *shape[1:]) if shape[0] < rows < shape[0] + MOST_PADDING else shape


def layers_of(pieces: Iterable[Piece]) -> set[tuple[str, int]]:
    """(tensor of stacked layers, number of a layer) of what is asked for."""
    stacked = [piece for piece in pieces if piece.shape and re.search(r"\.layers\.(?!\d)", piece.key)]
    return {(p.key, p.offset[0] + layer) for p in stacked for layer in range(p.data.shape[0])}


def layers_lacking(asked: set[tuple[str, int]], records: Mapping[str, TensorStorageMetadata]) -> str | None:
    """A sentence where the file has more layers than all ranks of the model together."""
    for key in sorted({key for key, _ in asked}):
        here, there = sum(key == other for other, _ in asked), records[key].size[0]
        if here < there:
            return f"{key!r} has {there} layers in the file and the model {here}; build the model that was saved"
    return None


def _half(piece: Piece, number: int, key: str) -> list[Piece]:
    """What a part of a gated weight holds of its gate (0) or of its value (1), which are tensors of their own."""
    half, begin = piece.shape[0] // 2, piece.offset[0]
    first, last = max(begin, number * half), min(begin + piece.data.shape[0], (number + 1) * half)
    place = (first - number * half, *piece.offset[1:])
    return (
        [Piece(key, (half, *piece.shape[1:]), place, piece.data[first - begin : last - begin])] if first < last else []
    )

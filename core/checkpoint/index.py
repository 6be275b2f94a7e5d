"""The index that torch.distributed.checkpoint loads by: which box of which tensor lies where.

It is made from the manifest. A checkpoint also has torch's own index, a pickle named .metadata, for torch's reader; it
is read here for checkpoints of earlier versions alone, whose manifests have no boxes, and runs no code.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from core.checkpoint.errors import CheckpointDamaged
from core.checkpoint.manifest import Manifest

CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
}


def index_of(manifest: Manifest) -> Metadata:
    """The index of a manifest that has boxes."""
    records: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for file in manifest.files:
        for segment in file.segments:
            index = MetadataIndex(segment.name)
            if segment.box is None:
                records[segment.name] = BytesStorageMetadata()
            else:
                tensor = manifest.tensors[segment.name]
                record = records.get(segment.name)
                if record is None:
                    properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
                    record = TensorStorageMetadata(properties, torch.Size(tensor.shape), [])
                    records[segment.name] = record
                offset, size = map(torch.Size, segment.box)
                index = MetadataIndex(segment.name, offset)
                record.chunks.append(ChunkStorageMetadata(offset, size))
            places[index] = _StorageInfo(file.name, segment.offset, segment.length)
    return Metadata(records, storage_data=places)


def read_older_index(data: bytes) -> Metadata:
    """torch's own index. CheckpointDamaged for a pickle that names anything but the classes of one."""
    try:
        index = IndexUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # what a broken or hostile pickle raises is without end
        raise CheckpointDamaged(f".metadata is no index of tensors: {error}") from None
    if not isinstance(index, Metadata):
        raise CheckpointDamaged(f".metadata is no index of tensors but a {type(index).__name__}")
    return index


class IndexUnpickler(pickle.Unpickler):
    """Makes the parts of an index; UnpicklingError for anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """A class of an index, which runs no code."""
        if name in CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        raise _may_run_code(f"{module}.{name}")


def _member_of(kind: Any, name: str) -> Any:
    """Instead of `getattr`, by which some versions of Python 3.11 pickle a member of an Enum."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise _may_run_code(f"builtins.getattr of {name!r}")


def _may_run_code(name: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"it names {name}, which may run code")

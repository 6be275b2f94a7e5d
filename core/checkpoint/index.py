"""The index that torch.distributed.checkpoint loads by: which box of which tensor lies where.

It is made from the manifest. A checkpoint also has torch's own index, a pickle named .metadata, for torch's reader.
"""

from __future__ import annotations

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

from core.checkpoint.manifest import Manifest


def index_of(manifest: Manifest) -> Metadata:
    """The index of a manifest."""
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

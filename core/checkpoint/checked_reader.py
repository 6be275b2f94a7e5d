"""Storage reader for torch.distributed.checkpoint that verifies every item while it is loaded.

``find_intact`` has already read all files. Checking again costs one CRC of bytes that are in memory anyway, and catches
a disk, cache or network that returns different bytes to this rank than to the rank that checked.
"""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from core.checkpoint.bounded_read import Part
from core.checkpoint.errors import CheckpointDamaged, CheckpointError, explain
from core.checkpoint.manifest import FileRecord, ItemBytes, Manifest


class CheckedReader(StorageReader):
    """Storage reader for one committed directory."""

    def __init__(self, path: Path, manifest: Manifest, rank: int) -> None:
        self.path = path
        self.manifest = manifest
        self.rank = rank  # reading rank, for messages
        self._files = {file.name: file for file in manifest.files}
        self._places: dict[Any, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Reject a different directory from ``dcp.load``, because this reader is bound to one."""
        if checkpoint_id is not None:
            raise CheckpointError(f"dcp.load was given checkpoint_id={checkpoint_id!r}; this reader reads {self.path}.")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return index_of(self.manifest)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned items file by file, front to back. An item requested in several pieces is read once."""
        by_file: dict[str, dict[int, list[ReadItem]]] = {}
        for item in plan.items:
            place = self._places[item.storage_index]
            by_file.setdefault(place.relative_path, {}).setdefault(place.offset, []).append(item)
        memory = bytearray()  # reused for all items: fresh pages cost more than the copy into them
        for name, by_offset in sorted(by_file.items()):
            record = self._record(name)
            with self._open(record) as stream:
                for offset, items in sorted(by_offset.items()):
                    segment = self._segment(record, offset, items[0])
                    if len(memory) < segment.length:
                        memory = bytearray(segment.length)
                    data = memoryview(memory)[: segment.length]
                    stream.seek(offset)
                    data = data[: stream.readinto(data)]
                    self._check(record, f"'{segment.name}'", data, segment.length, segment.crc32)
                    _deliver(data, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return ``False``, because only CheckpointDirectory creates these readers."""
        return False

    def _segment(self, record: FileRecord, offset: int, item: ReadItem) -> ItemBytes:
        name = item.storage_index.fqn
        segment = record.segment_at(offset)
        if segment is None or segment.name != name:
            raise CheckpointDamaged(
                f"rank {self.rank}: {self.path / record.name} should hold '{name}' at byte {offset}, and its manifest "
                f"has {'nothing' if segment is None else repr(segment.name)} there."
            )
        return segment

    def _record(self, name: str) -> FileRecord:
        if name not in self._files:
            raise CheckpointDamaged(f"rank {self.rank}: {self.path / name} is not in the manifest.")
        return self._files[name]

    def _open(self, record: FileRecord) -> io.BufferedReader:
        path = self.path / record.name
        try:
            return open(path, "rb")
        except OSError as error:
            raise CheckpointError(
                f"rank {self.rank} cannot read {explain(error, path)}. Was the checkpoint deleted while it was read "
                "(keep_last of a job that saves here)? Load again, or name a step."
            ) from error

    def _check(self, record: FileRecord, what: str, data: bytes | memoryview, size: int, crc32: int) -> None:
        if len(data) == size and zlib.crc32(data) == crc32:
            return
        raise CheckpointDamaged(
            f"rank {self.rank}: {self.path / record.name} (written by rank {record.rank}) gives other bytes for {what} "
            f"than were saved: {len(data)} bytes with checksum {zlib.crc32(data):08x}, saved {size} with {crc32:08x}."
        )


def _deliver(data: memoryview, items: list[ReadItem], planner: LoadPlanner) -> None:
    """Pass one item's bytes to the planner, once for each requested piece."""
    saved: torch.Tensor | None = None
    for item in items:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(data))
            continue
        if saved is None:
            saved = torch.load(
                Part(lambda at, count: data[at : at + count], len(data)), map_location="cpu", weights_only=True
            )
        piece = saved
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            piece = piece.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        if target.shape != piece.shape:
            raise CheckpointError(
                f"'{item.storage_index.fqn}': the plan wants shape {list(target.shape)} from a piece of shape "
                f"{list(piece.shape)}."
            )
        target.copy_(piece)
        planner.commit_tensor(item, target)


def index_of(manifest: Manifest) -> Metadata:
    """Build the index that torch.distributed.checkpoint loads by from a manifest.

    A checkpoint also has torch's own index, a pickle named .metadata, for torch's reader.
    """
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

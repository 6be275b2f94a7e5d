"""Planners for torch.distributed.checkpoint. Each rank writes and reads its own pieces, and only plans are gathered."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from core.checkpoint.pieces import Piece


class PieceSavePlanner(SavePlanner):
    """Save planner that writes exactly the given pieces and blobs from this rank.

    The first rank checks all plans before a byte is written. It rejects tensors that are not covered exactly once.
    """

    def __init__(self, pieces: Iterable[Piece], blobs: Mapping[str, bytes]) -> None:
        self.pieces = {(piece.key, piece.offset): piece for piece in pieces}
        self.blobs = dict(blobs)

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing, because the constructor received the pieces."""

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(piece) for piece in self.pieces.values()]
        for key, blob in self.blobs.items():
            items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, BytesIOWriteData(len(blob))))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check on the first rank that all plans fit together, or raise ValueError with the tensor and the ranks."""
        check_coverage([plan.items for plan in all_plans])
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan, which other ranks' plans do not change."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.blobs[index.fqn])
        assert index.offset is not None, "pieces are planned with their offset"
        return self.pieces[index.fqn, tuple(index.offset)].data.detach()


def _write_item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offset), piece.data.shape)
    properties = TensorProperties(dtype=piece.data.dtype)
    return WriteItem(
        MetadataIndex(piece.key, torch.Size(piece.offset)),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, properties, torch.Size(piece.shape)),
    )


def check_coverage(plans: Sequence[Sequence[WriteItem]]) -> None:
    """Check that every tensor in the items of all ranks has one shape and dtype, and is covered exactly once.

    Raises ValueError, naming the tensor and the ranks.
    """
    by_key: dict[str, list[tuple[int, WriteItem]]] = defaultdict(list)
    for rank, items in enumerate(plans):
        for item in items:
            by_key[item.index.fqn].append((rank, item))
    for key, found in by_key.items():
        tensors = [(rank, item.tensor_data) for rank, item in found if item.tensor_data is not None]
        if len(tensors) < len(found):
            if len(found) > 1:
                raise ValueError(
                    f"ranks {sorted(rank for rank, _ in found)} all write {key!r}; do their process groups distinguish "
                    "them?"
                )
            continue
        first_rank, first = tensors[0]
        for rank, data in tensors:
            if (data.size, data.properties.dtype) != (first.size, first.properties.dtype):
                raise ValueError(
                    f"{key!r} is {list(first.size)} {first.properties.dtype} for rank {first_rank} and "
                    f"{list(data.size)} {data.properties.dtype} for rank {rank}; "
                    "do two pipeline stages use one name for different parameters (module.global_names)?"
                )
        _check_cover(key, list(first.size), [(rank, data.chunk) for rank, data in tensors])


def _check_cover(key: str, shape: list[int], chunks: list[tuple[int, ChunkStorageMetadata]]) -> None:
    dim = max(range(len(shape)), key=lambda d: shape[d], default=None)
    if dim is not None:
        # Sorted along the longest dimension, only neighbors that reach into a chunk can overlap it.
        chunks = sorted(chunks, key=lambda entry: entry[1].offsets[dim])
        active: list[tuple[int, ChunkStorageMetadata]] = []
        for rank, chunk in chunks:
            active = [other for other in active if other[1].offsets[dim] + other[1].sizes[dim] > chunk.offsets[dim]]
            for other_rank, other in active:
                if _overlap(chunk, other):
                    raise ValueError(
                        f"ranks {other_rank} and {rank} both write a part of {key!r} (offset {list(chunk.offsets)}, "
                        f"size {list(chunk.sizes)}). If two pipeline stages use one name for different parameters, set "
                        "module.global_names to their names in the full model"
                    )
            active.append((rank, chunk))
    covered = sum(math.prod(chunk.sizes) for _, chunk in chunks)
    if covered != math.prod(shape) or (dim is None and len(chunks) > 1):
        raise ValueError(
            f"{key!r} has {math.prod(shape)} elements {shape} and ranks {sorted({rank for rank, _ in chunks})} write "
            f"{covered}; a rank with a part of it did not take part, or its tags do not say how it is split"
        )


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        a < b + q and b < a + p for a, p, b, q in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


class PieceLoadPlanner(LoadPlanner):
    """Load planner that reads the given pieces, from any chunks they were saved in, and blobs."""

    def __init__(self, pieces: Sequence[Piece], blob_keys: Iterable[str]) -> None:
        self.pieces = list(pieces)
        self.blob_keys = list(blob_keys)
        self.blobs: dict[str, bytes] = {}
        self.metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None, "torch gives the metadata to a load planner"
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items = [item for number, piece in enumerate(self.pieces) for item in read_items(piece, number, self.metadata)]
        empty = torch.Size(())
        for key in self.blob_keys:
            index = MetadataIndex(key)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, empty, index, empty, empty))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged, because every rank reads its own items."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan, which other ranks' plans do not change."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.blobs[read_item.storage_index.fqn] = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None, "items are planned with the number of their piece"
        target = self.pieces[number].data
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing, because the tensor was read directly into the piece's memory."""


def read_items(piece: Piece, number: int, metadata: Metadata) -> list[ReadItem]:
    """Return the overlaps of one piece with the file's chunks. Raises ValueError if the chunks do not cover the
    piece.
    """
    if not piece.data.numel():
        return []
    record = metadata.state_dict_metadata.get(piece.key)
    if not isinstance(record, TensorStorageMetadata):
        raise ValueError(f"the checkpoint holds no tensor {piece.key!r}")
    chunk = ChunkStorageMetadata(torch.Size(piece.offset), piece.data.shape)
    items = create_read_items_for_chunk_list(piece.key, record, [chunk])
    found = sum(math.prod(item.lengths) for item in items)
    if found != piece.data.numel():
        raise ValueError(
            f"the checkpoint's chunks hold {found} of the {piece.data.numel()} elements of {piece.key!r} at offset "
            f"{list(piece.offset)}, size {list(piece.data.shape)}"
        )
    # One tensor may be read twice (a master weight from the model's tensor), so pieces are distinguished by number.
    return [replace(item, dest_index=MetadataIndex(piece.key, item.dest_index.offset, number)) for item in items]


def tensor_records(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the tensors of an index by name."""
    records = metadata.state_dict_metadata
    return {key: record for key, record in records.items() if isinstance(record, TensorStorageMetadata)}


def blob_keys(metadata: Metadata) -> set[str]:
    """Return the names of entries that are not tensors."""
    return {key for key, record in metadata.state_dict_metadata.items() if isinstance(record, BytesStorageMetadata)}

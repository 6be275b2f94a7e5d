"""Storage writer for torch.distributed.checkpoint: one rank's data files in the directory of a save.

``dcp.save`` plans with collectives and calls ``write_data`` on every rank, all in the caller's thread. A synchronous
save writes its files in that call, directly from the tensors. An asynchronous save copies the tensors in that call and
writes later, in a thread that does not communicate with other ranks. Therefore the location of an item is in the rank's
part of the manifest, and not in the results that ``dcp.save`` collects; rank 0 combines the two when all parts have
arrived.

The files have the format of torch's own FileSystemWriter (items by torch.save, an index named .metadata), so its
FileSystemReader can read a committed directory.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from core.checkpoint.durable_file import DurableFile, sync_directory
from core.checkpoint.errors import CheckpointError, explain
from core.checkpoint.manifest import Box, FileRecord, TensorRecord
from core.checkpoint.save_points import reach
from core.checkpoint.snapshot import SnapshotMemory, with_own_storage

ITEM_OVERHEAD_BYTES = 2048  # overhead of torch.save per tensor
Item = tuple[tuple[str, Box | None], torch.Tensor | io.BytesIO]  # name and box, content


class StagingWriter(StorageWriter):
    """Storage writer of this rank's items into ``saving``. Pass it to exactly one ``dcp.save``."""

    def __init__(
        self,
        saving: Path,
        rank: int,
        *,
        file_bytes: int,
        check_space: Callable[[int], None],
        snapshot: SnapshotMemory | None = None,
        snapshot_limit_bytes: int | None = None,
    ) -> None:
        """Create a writer for one save.

        Args:
            file_bytes: Size at which a new data file starts.
            check_space: Called on rank 0 with the bytes of all ranks before any is written. Raises if they do not fit.
            snapshot: Memory for copies of an asynchronous save. None writes synchronously.
            snapshot_limit_bytes: Larger snapshots are written synchronously.
        """
        self.saving = saving
        self.rank = rank
        self.records: list[FileRecord] = []  # records of durable files
        self.bytes = 0  # planned bytes of this rank's items
        self.metadata: Metadata | None = None  # rank 0: the index, without places
        self.results: list[list[WriteResult]] = []  # rank 0: by rank, in the order in which items are written
        self.pending: list[Item] | None = None  # copies waiting to be written
        self.was_used = False
        self.was_copied = False  # False: written before dcp.save returned
        self.cancelled = threading.Event()
        self._file_bytes = file_bytes
        self._check_space = check_space
        self._snapshot = snapshot
        self._snapshot_limit_bytes = snapshot_limit_bytes

    # --- called by dcp.save ---

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Reject a different directory from ``dcp.save``, because the save already has one."""
        if checkpoint_id is not None:
            raise CheckpointError(f"dcp.save was given checkpoint_id={checkpoint_id!r}; the saver names directories.")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self.was_used:
            raise CheckpointError("`fill` called dcp.save twice; one save is one dcp.save with everything in it.")
        if is_coordinator != (self.rank == 0):
            raise CheckpointError(
                "dcp.save has its coordinator elsewhere than on rank 0 of the saver's group "
                f"(this is rank {self.rank}); give both the same process group."
            )
        self.was_used = True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check on rank 0 that the planned bytes of all ranks fit into the free space."""
        self._check_space(sum(planned_bytes(plan.items) for plan in plans))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, or copy them to be written later."""
        self.bytes = planned_bytes(plan.items)
        data = [planner.resolve_data(item) for item in plan.items]
        names = [(item.index.fqn, _box_of(item)) for item in plan.items]
        tensors = [value for value in data if isinstance(value, torch.Tensor)]
        limit = self._snapshot_limit_bytes
        fits = limit is None or SnapshotMemory.bytes_for(tensors) <= limit
        if self._snapshot is not None and fits:
            copies = iter(self._snapshot.take(tensors))
            kept = [next(copies) if isinstance(value, torch.Tensor) else io.BytesIO(value.getvalue()) for value in data]
            self.pending, self.was_copied = list(zip(names, kept, strict=True)), True
        else:
            self._write(list(zip(names, data, strict=True)))
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, _planned_size(item), None) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Store the index on rank 0 until the locations are known."""
        self.metadata, self.results = metadata, results

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return ``False``, because only the saver creates these writers."""
        return False

    def storage_meta(self) -> StorageMeta | None:
        """Return ``None``, because the directory's name changes when it is committed."""
        return None

    # --- called by the saver ---

    def write_pending(self) -> None:
        """Write the copies, if any. Works in any thread, without collectives."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self._write(pending)

    def _write(self, items: Sequence[Item]) -> None:
        """Write data files of about ``file_bytes`` each. They are durable when this returns."""
        reach("before data", self.rank)
        remaining = sum(_size(data) for _, data in items)
        file: DurableFile | None = None
        try:
            for (name, box), data in items:
                if self.cancelled.is_set():
                    raise CheckpointError("the save was given up because another rank failed")
                if file is not None and file.size >= self._file_bytes:
                    self.records.append(file.finish())
                    file = None
                    reach("between files", self.rank)
                if file is None:
                    path = self.saving / f"rank_{self.rank:05d}_{len(self.records):03d}.distcp"
                    file = DurableFile(path, self.rank, expected_bytes=min(remaining, self._file_bytes))
                with file.segment(name, box):
                    _write_item(file, data)
                remaining -= _size(data)
            if file is not None:
                self.records.append(file.finish())
            sync_directory(self.saving)
        except OSError as error:
            raise CheckpointError(explain(error, self.saving, self.bytes)) from error
        finally:
            if file is not None:
                file.abandon()


def planned_bytes(items: Sequence[WriteItem]) -> int:
    """Return the file bytes needed for ``items``, rounded up."""
    return sum(_planned_size(item) + ITEM_OVERHEAD_BYTES for item in items)


def tensor_records(metadata: Metadata) -> dict[str, TensorRecord]:
    """Return the global shapes and dtypes of an index's tensors by name."""
    return {
        name: TensorRecord(tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _write_item(file: DurableFile, data: torch.Tensor | io.BytesIO) -> None:
    try:
        if isinstance(data, torch.Tensor):
            torch.save(with_own_storage(data), file)
        else:
            file.write(data.getbuffer())
    except Exception:
        if file.error is not None:  # torch.save's writer converts it into its own errors
            raise file.error from None
        raise


def _size(data: torch.Tensor | io.BytesIO) -> int:
    if isinstance(data, torch.Tensor):
        return data.numel() * data.element_size() + ITEM_OVERHEAD_BYTES
    return data.getbuffer().nbytes


def _box_of(item: WriteItem) -> Box | None:
    if item.tensor_data is None:
        return None
    return tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)


def _planned_size(item: WriteItem) -> int:
    if item.type == WriteItemType.BYTE_IO:
        return 0 if item.bytes_io_data is None else item.bytes_io_data.nbytes
    assert item.tensor_data is not None, "an item that is not bytes is a tensor"
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize

"""Writers for files and directory entries that are on disk, not only in a cache, when the call returns."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from core.checkpoint.manifest import Box, FileRecord, ItemBytes
from core.checkpoint.save_points import reach

Bytes = bytes | bytearray | memoryview
BUFFER_BYTES = 1 << 20


class DurableFile:
    """New file, written once from front to back, with a checksum computed from the bytes before they are written.

    A checksum of bytes read back would accept a torn write. torch.save needs ``write`` and ``flush``.
    """

    def __init__(self, path: Path, rank: int, expected_bytes: int = 0) -> None:
        """Create the file at a path that does not exist.

        ``expected_bytes`` is only used to place the save point 'half a file'.
        """
        self.path = path
        self.rank = rank
        self.size = 0
        self.error: OSError | None = None  # error of the first write that failed
        self._half = expected_bytes // 2
        self._crc32 = 0
        self._segment_crc32 = 0
        self._segments: list[ItemBytes] = []
        self._stream = open(path, "xb", buffering=BUFFER_BYTES)  # noqa: SIM115  closed by `finish` or `abandon`

    def write(self, data: Bytes) -> int:
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else data
        try:
            if self._half and self.size + len(view) > self._half:
                split = self._half - self.size
                self._half = 0
                self._append(view[:split])
                self._stream.flush()
                reach("half a file", self.rank)
                self._append(view[split:])
            else:
                self._append(view)
        except OSError as error:
            self.error = self.error or error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing. torch.save flushes after every tensor, but only the fsync at the end matters."""

    @contextlib.contextmanager
    def segment(self, name: str, box: Box | None = None) -> Iterator[None]:
        """Record the bytes written inside this context as the item ``name``, or as a box of it."""
        start, self._segment_crc32 = self.size, 0
        yield
        self._segments.append(ItemBytes(name, start, self.size - start, self._segment_crc32, box))

    def finish(self) -> FileRecord:
        self._stream.flush()
        reach("before file fsync", self.rank)
        os.fsync(self._stream.fileno())
        self._stream.close()
        return FileRecord(self.path.name, self.rank, self.size, self._crc32, tuple(self._segments))

    def abandon(self) -> None:
        """Close the file after a failure, ignoring file system errors."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.close()

    def _append(self, view: Bytes) -> None:
        self._stream.write(view)
        self._crc32 = zlib.crc32(view, self._crc32)
        self._segment_crc32 = zlib.crc32(view, self._segment_crc32)
        self.size += len(view)


def write_durably(path: Path, data: bytes, rank: int, half_point: str | None = None) -> FileRecord:
    """Replace a file atomically, so that readers see the old file, no file, or the complete new file."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as stream:
        half = len(data) // 2
        stream.write(data[:half])
        if half_point is not None:
            stream.flush()
            reach(half_point, rank)
        stream.write(data[half:])
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)
    return FileRecord(path.name, rank, len(data), zlib.crc32(data))


def sync_directory(path: Path) -> None:
    """Sync a directory's entries to disk, because a file whose directory entry is lost is lost."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

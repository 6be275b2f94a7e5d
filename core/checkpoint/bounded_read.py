"""Readers for untrusted files: only regular files are opened, and never more bytes are read than expected."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

CHUNK_BYTES = 4 << 20
LONGEST_JSON = 128 << 20  # bytes; ten times the manifest of a thousand ranks


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Any other path raises OSError, because opening a FIFO would block and a device never ends.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: int = LONGEST_JSON) -> bytes:
    """Read a small file completely. Raises OSError if it is not a regular file, or larger than ``limit`` bytes."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"has {size} bytes, and at most {limit} are read", str(path))
        return stream.read(limit + 1)


def parse_json(data: bytes) -> Any:
    """Parse JSON. Raises ValueError if the data is not JSON, is nested too deeply, or has numbers out of range."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def file_name(name: Any) -> str:
    """Validate a file name that an index or manifest lists for its own directory.

    Raises ValueError if the name is empty or points outside the directory.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file in this directory")
    return name


class BadArchive(ValueError):
    """Error for a zip file that torch.save did not write. The text says how it differs."""


def entries_of(stream: BinaryIO, start: int, length: int) -> dict[str, int]:
    """Return the sizes of entries in an uncompressed zip file from torch.save, embedded at ``start`` in a larger file.

    The first path component of the names, which torch takes from the file name, is removed. Raises BadArchive if the
    zip file is truncated or compressed, would inflate to more bytes than it has, or has two entries with the same name.
    """

    def read(at: int, count: int) -> bytes:
        if count > LONGEST_JSON:  # the zip file itself states the length of its directory
            raise OSError(f"{count} bytes at once")
        return _bytes_at(stream, start + at, count)

    try:
        entries = zipfile.ZipFile(Part(read, length)).infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, OverflowError, MemoryError):
        raise BadArchive("is not a complete zip file") from None
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or (
        sum(entry.file_size for entry in entries) > length
    ):
        raise BadArchive(f"would inflate to more than its {length} bytes")
    sizes = {entry.filename.partition("/")[2]: entry.file_size for entry in entries}
    if len(sizes) != len(entries):
        raise BadArchive("has two entries of one name")
    return sizes


def inflates(stream: BinaryIO, start: int, length: int) -> bool:
    """Return ``True`` if the zip file at these bytes is truncated or compressed. torch.save never compresses."""
    try:
        return _bytes_at(stream, start, 2) == b"PK" and not entries_of(stream, start, length)
    except BadArchive:
        return True


class Part(io.RawIOBase):
    """File object over a byte range, without the copy that io.BytesIO would make.

    ``read`` maps (offset, count) to that many bytes.
    """

    def __init__(self, read: Callable[[int, int], bytes | memoryview], length: int) -> None:
        self._read, self._length, self._at = read, length, 0

    @classmethod
    def of(cls, stream: BinaryIO, start: int, length: int) -> Part:
        return cls(lambda at, count: _bytes_at(stream, start + at, count), length)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if at < 0:
            raise OSError("before the first byte")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        data = self._read(self._at, max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _bytes_at(stream: BinaryIO, at: int, count: int) -> bytes:
    stream.seek(at)
    return stream.read(count)


def crc32_of(stream: BinaryIO, start: int = 0, length: int | None = None, crc32: int = 0) -> int:
    """Compute the CRC-32 of a file or a byte range of it, continuing from the checksum ``crc32``."""
    stream.seek(start)
    remaining = os.fstat(stream.fileno()).st_size if length is None else length
    while remaining and (data := stream.read(min(CHUNK_BYTES, remaining))):
        crc32 = zlib.crc32(data, crc32)
        remaining -= len(data)
    return crc32

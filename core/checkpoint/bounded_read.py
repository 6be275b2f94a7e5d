"""Reading files that somebody else may have made: regular ones only, and no more of them than is expected."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

CHUNK_BYTES = 4 << 20
LONGEST_JSON = 128 << 20  # bytes; the manifest of a thousand ranks has a tenth of that


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it. OSError for anything but a regular file: a FIFO makes one wait, a device never ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: int = LONGEST_JSON) -> bytes:
    """The whole of a small file. OSError where it is no regular file or is larger than `limit`."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"has {size} bytes, and at most {limit} are read", str(path))
        return stream.read(limit + 1)


def parse_json(data: bytes) -> Any:
    """A JSON value. ValueError for anything else, for nesting without end, and for numbers that no file holds."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def file_name(name: Any) -> str:
    """The name of a file in the directory whose index or manifest has it. ValueError where it names anything else."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file in this directory")
    return name


def inflates(stream: BinaryIO, start: int, length: int) -> bool:
    """True if a zip file at these bytes is cut or would give more than it has; torch.save never compresses."""
    stream.seek(start)
    if stream.read(2) != b"PK":
        return False
    try:
        with zipfile.ZipFile(_Part(stream, start, length)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        return True
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    return not stored or sum(entry.file_size for entry in entries) > length


class _Part(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

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

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._start + self._at)
        data = self._stream.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def crc32_of(stream: BinaryIO, start: int = 0, length: int | None = None, crc32: int = 0) -> int:
    """CRC-32 of a file or of a part of it, after `crc32` of what came before."""
    stream.seek(start)
    remaining = length
    while remaining is None or remaining > 0:
        data = stream.read(CHUNK_BYTES if remaining is None else min(CHUNK_BYTES, remaining))
        if not data:
            break
        crc32 = zlib.crc32(data, crc32)
        remaining = None if remaining is None else remaining - len(data)
    return crc32

"""File of tensors in the format of torch.save or safetensors: written atomically and durably, verified when read.

Each file carries the CRC-32 of its other bytes as 8 digits, in the comment at the end of a zip file or in the metadata
of a safetensors header. A file without these digits was written by another program.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from core.checkpoint.bounded_read import crc32_of, inflates, open_regular
from core.checkpoint.durable_file import sync_directory
from core.checkpoint.errors import CheckpointDamaged, CheckpointError, code_in

SAFE_SUFFIX = ".safetensors"
COMMENT, METADATA, DIGITS = b"crc32:", b'"crc32":"', b"00000000"
LONGEST_HEADER = 100_000_000  # bytes of a safetensors header; the package rejects longer ones
LOCK_LIMIT_S = 5.0


def save_torch(path: Path, content: Any) -> None:
    """Write a file with torch.save, replacing any file at ``path``."""

    def write(temporary: str) -> None:
        torch.save(content, temporary)
        with open(temporary, "r+b") as stream:  # the last two bytes of a zip file are the length of its comment
            stream.seek(-2, os.SEEK_END)
            stream.write(len(COMMENT + DIGITS).to_bytes(2, "little") + COMMENT + DIGITS)

    _replace(path, write)


def save_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, replacing any file at ``path``. Raises CheckpointError if safetensors is not
    installed.
    """
    save_file = safetensors("safetensors.torch").save_file
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = {"format": "pt", "crc32": DIGITS.decode()}
    _replace(path, lambda temporary: save_file(kept, temporary, metadata=metadata))


def open_safetensors(path: Path, *, verify: bool = True) -> Any:
    """Open a safetensors file, whose tensors are read one by one or in slices. All safetensors files are opened here.

    ``verify`` compares the checksum if the file carries one. Raises CheckpointDamaged if it differs or the file is not
    a regular, complete safetensors file, and FileNotFoundError if it does not exist.
    """
    safe_open = safetensors("safetensors").safe_open
    try:
        open_regular(path).close()
        opened = safe_open(str(path), framework="pt", device="cpu")  # compares the size with the header
        if verify:
            check(path)
        return opened
    except (CheckpointDamaged, FileNotFoundError):
        raise
    except Exception as error:  # the package's error class has moved between versions
        raise CheckpointDamaged(f"{path} is not a complete safetensors file: {error}") from None


def in_turn(path: Path, rank: int, world: int) -> bool:
    """Return ``True`` on the one of ``world`` ranks that verifies the checksum of this file."""
    return zlib.crc32(path.name.encode()) % world == rank


def load(path: Path) -> Any:
    """Load a file of either format to the CPU, regardless of its suffix, without running code from it.

    Raises CheckpointDamaged if the file cannot be read, and OSError if it cannot be opened.
    """
    if _holds_safetensors(path):
        opened = open_safetensors(path)
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no dictionary
    check(path)
    with open_regular(path) as stream:
        return _read_torch(path, stream)  # given a path, torch decides by its suffix


class Description(NamedTuple):
    """Description of a tensor in a file. ``kind`` is the file's own name of the dtype, such as F32 or float32."""

    shape: list[int]
    kind: str


def is_kind_with_point(kind: str) -> bool:
    """Return ``True`` for a floating point or complex dtype, by torch's or safetensors' name."""
    return kind.lower().startswith(("f", "bf", "c"))


def describe(path: Path) -> dict[str, Description]:
    """Return descriptions of the tensors in a file of either format, without their values.

    Checksums are not verified. Only torch's format from before version 1.6 is read completely. Raises CheckpointDamaged
    if the file cannot be read, and OSError if it cannot be opened.
    """
    if _holds_safetensors(path):
        opened = open_safetensors(path, verify=False)
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  it is no dictionary
        return {name: Description(found.get_shape(), found.get_dtype()) for name, found in slices.items()}
    _refuse_inflated(path)
    with open_regular(path) as stream:
        mapped = stream.read(2) == b"PK" and path.suffix != SAFE_SUFFIX  # torch's rule for a path
    content = _read_torch(path, str(path), mmap=True) if mapped else load(path)
    if not isinstance(content, Mapping):
        raise CheckpointDamaged(f"{path} holds a {type(content).__name__}; expected a state_dict, names with tensors")
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    return {
        name: Description(list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }


def _holds_safetensors(path: Path) -> bool:
    """Return ``True`` for a safetensors file, by its first bytes, or by its suffix unless torch wrote it."""
    with open_regular(path) as stream:
        start = stream.read(9)
    return start[:2] != b"PK" and (path.suffix == SAFE_SUFFIX or start[8:] == b"{")


def _read_torch(path: Path, source: Any, **options: Any) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise CheckpointDamaged(
            f"{path} holds other things than tensors ({code_in(error)}), and reading them can run code; if you "
            "trust those who made it, make a plain file of it: python -m core_compat.convert "
            "--trust-foreign-files"
        ) from None
    except Exception as error:  # error classes differ between versions of torch and safetensors
        raise CheckpointDamaged(f"{path} is no file of tensors: {error or type(error).__name__}") from error


def checksum_in(path: Path) -> str | None:
    """Return the checksum that a file carries, or ``None`` for files of other programs."""
    with open_regular(path) as stream:
        place = _place_of_digits(stream)
        return None if place is None else _bytes_at(stream, place, len(DIGITS)).decode("ascii", "replace")


def check(path: Path) -> None:
    """Verify a file's checksum, and that it does not inflate.

    Raises CheckpointDamaged if bytes differ from the saved ones, or would inflate to more bytes than the file has.
    """
    with open_regular(path) as stream:
        place = _place_of_digits(stream)
        if place is not None and (found := _crc32(stream, place)) != _bytes_at(stream, place, len(DIGITS)):
            raise CheckpointDamaged(f"{path} has other bytes than were saved (checksum {found.decode()})")
    _refuse_inflated(path)


def _refuse_inflated(path: Path) -> None:
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if inflates(stream, 0, size):
            raise CheckpointDamaged(f"{path} is cut, or would inflate to more than its {size} bytes")


def safetensors(module: str) -> Any:
    """Import a module of the safetensors package. Raises CheckpointError with the install command if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CheckpointError(
            f"safetensors files need the package 'safetensors', which could not be imported ({error}); install it "
            "with: pip install 'gradient-core[safetensors]'"
        ) from None


@contextlib.contextmanager
def only_writer(place: Path, make: Callable[[Path], Any]) -> Iterator[None]:
    """Create a hidden file or directory with ``make`` and lock it during the context.

    Raises CheckpointError if another process locks it for 5 s.
    """
    until = time.monotonic() + LOCK_LIMIT_S
    while True:
        make(place)
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _is_ours(descriptor, place):
                yield
                return
        finally:
            os.close(descriptor)
        if time.monotonic() > until:
            raise CheckpointError(f"another process is writing {place}; end it, or save under another name")
        time.sleep(0.05)


def _is_ours(descriptor: int, place: Path) -> bool:
    """Return ``True`` if this process locked the file and the file still exists under its name."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return place.exists() and os.path.samestat(os.fstat(descriptor), os.stat(place))


def _replace(path: Path, write: Callable[[str], Any]) -> None:
    """Write a temporary file durably and rename it to ``path``, so that readers see the old or the complete new
    file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with only_writer(temporary, Path.touch):
        try:
            write(str(temporary))
            with open(temporary, "r+b") as stream:
                place = _place_of_digits(stream)
                assert place is not None, "room for the digits was written a moment ago"
                digits = _crc32(stream, place)
                stream.seek(place)
                stream.write(digits)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _place_of_digits(stream: BinaryIO) -> int | None:
    """Return the offset of the file's checksum, or ``None`` if it has no checksum."""
    size = os.fstat(stream.fileno()).st_size
    end = max(0, size - 2 * len(COMMENT + DIGITS))
    found = _bytes_at(stream, end, size - end).rfind(COMMENT)  # not at the very end if the file was truncated
    if found >= 0:
        return end + found + len(COMMENT)
    length = int.from_bytes(_bytes_at(stream, 0, 8), "little")
    if length > min(size, LONGEST_HEADER):
        return None
    found = _bytes_at(stream, 8, length).find(METADATA)
    return None if found < 0 else 8 + found + len(METADATA)


def _bytes_at(stream: BinaryIO, offset: int, length: int) -> bytes:
    stream.seek(offset)
    return stream.read(length)


def _crc32(stream: BinaryIO, place: int) -> bytes:
    """Return the CRC-32 digits of a file, with its own digits at ``place`` counted as zeros."""
    before = zlib.crc32(DIGITS, crc32_of(stream, 0, place))
    return f"{crc32_of(stream, place + len(DIGITS), crc32=before):08x}".encode()

"""One file of tensors, as torch.save or safetensors writes it: whole or not there, durable, checked when it is read.

Each file carries the CRC-32 of its other bytes, as 8 digits where its format has room for words of others: the comment
at the end of a zip file, the metadata in a safetensors header. A file without these digits is somebody else's.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from core.bounded_read import crc32_of, file_name, inflates, open_regular, parse_json, read_bytes
from core.checkpoint.durable_file import sync_directory, write_durably
from core.checkpoint.errors import CheckpointDamaged, CheckpointError, code_in

Item = TypeVar("Item")
SAFE_SUFFIX = ".safetensors"
COMMENT, METADATA, DIGITS = b"crc32:", b'"crc32":"', b"00000000"
FILES = "files_crc32"  # in the metadata of an index: {file: its checksum} of the files that were saved with it
LONGEST_HEADER = 100_000_000  # bytes of a safetensors header; the package refuses longer ones
LOCK_LIMIT_S = 5.0


def save_torch(path: Path, content: Any) -> None:
    """torch.save, in the place of whatever was at `path`."""

    def write(temporary: str) -> None:
        torch.save(content, temporary)
        with open(temporary, "r+b") as stream:  # the last two bytes of a zip file are the length of its comment
            stream.seek(-2, os.SEEK_END)
            stream.write(len(COMMENT + DIGITS).to_bytes(2, "little") + COMMENT + DIGITS)

    _replace(path, write)


def save_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file, in the place of whatever was at `path`. CheckpointError without the package."""
    save_file = safetensors("safetensors.torch").save_file
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    told = {"format": "pt", "crc32": DIGITS.decode(), **(metadata or {})}
    _replace(path, lambda temporary: save_file(kept, temporary, metadata=told))


def safetensors_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with safetensors("safetensors").safe_open(str(path), framework="pt") as file:
        return dict(file.metadata() or {})


def load(path: Path) -> Any:
    """The content of a file of either kind, on the CPU, whatever its name ends in. Runs no code from it.

    Raises CheckpointDamaged where it cannot be read, and OSError where it cannot be opened.
    """
    check(path)
    with open_regular(path) as stream:
        start = stream.read(9)
        is_torch = start[:2] == b"PK" or (path.suffix != SAFE_SUFFIX and start[8:] != b"{")
        stream.seek(0)
        load_file = None if is_torch else safetensors("safetensors.torch").load_file
        try:
            if load_file is not None:
                return load_file(str(path))
            return torch.load(stream, map_location="cpu", weights_only=True)  # given a name, torch goes by its suffix
        except pickle.UnpicklingError as error:
            raise CheckpointDamaged(
                f"{path} holds other things than tensors ({code_in(error)}), and reading them can run code; if you "
                "trust those who made it, make a plain file of it: python -m core.checkpoint convert "
                "--trust-foreign-files"
            ) from None
        except Exception as error:  # each version of torch and of safetensors has classes of its own
            raise CheckpointDamaged(f"{path} is no file of tensors: {error or type(error).__name__}") from error


def checksum_in(path: Path) -> str | None:
    """The checksum that a file carries; None in a file of other programs."""
    with open_regular(path) as stream:
        place = _place_of_digits(stream)
        return None if place is None else _bytes_at(stream, place, len(DIGITS)).decode("ascii", "replace")


def check_saved_together(index: Path, metadata: Mapping[str, Any], files: Iterable[Path]) -> None:
    """Raise CheckpointDamaged, by its name, for a file that is not the one that its index was saved with.

    Compares the checksums that files carry with those in the index. An index of other programs has none.
    """
    saved_with = metadata.get(FILES, {})
    for file in files:
        expected, found = saved_with.get(file.name), checksum_in(file)
        if expected not in (None, found):
            raise CheckpointDamaged(
                f"{file} is not the file that {index.name} was saved with: its checksum is {found}, and the index says "
                f"{expected}. It is of another save, or a copy of another file; take all files of one save"
            )


def check(path: Path) -> None:
    """Raise CheckpointDamaged where bytes are not those that were saved, or would inflate to more than the file has."""
    with open_regular(path) as stream:
        place = _place_of_digits(stream)
        if place is not None and (found := _crc32(stream, place)) != _bytes_at(stream, place, len(DIGITS)):
            raise CheckpointDamaged(f"{path} has other bytes than were saved (checksum {found.decode()})")
        size = os.fstat(stream.fileno()).st_size
        if inflates(stream, 0, size):
            raise CheckpointDamaged(f"{path} is cut, or would inflate to more than its {size} bytes")


def write_index(path: Path, weight_map: Mapping[str, str], metadata: Mapping[str, Any]) -> None:
    """Write the index of files in its directory: {tensor: file}.

    Its metadata carries its own checksum and those of all files there, so that a file of another save is recognised.
    """
    saved_with = {file.name: digits for file in path.parent.iterdir() if (digits := checksum_in(file))}
    content = {"metadata": {**metadata, FILES: saved_with}, "weight_map": dict(weight_map)}
    content["metadata"]["crc32"] = _crc32_of_index(content)
    write_durably(path, json.dumps(content, indent=2).encode() + b"\n", 0)


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """({tensor: file}, metadata). CheckpointDamaged for anything else, and for files outside of the directory."""
    try:
        content = parse_json(read_bytes(path))
        weight_map, metadata = dict(content["weight_map"]), dict(content.get("metadata", {}))
        digits = metadata.get("crc32")
        if digits is not None and digits != _crc32_of_index(content):
            raise ValueError("has other bytes than were saved")
        for name in weight_map.values():
            file_name(name)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointDamaged(f"{path} is no index of tensors: {error}") from None
    return weight_map, metadata


def _crc32_of_index(content: Mapping[str, Any]) -> str:
    """Of everything in it but the checksum."""
    told = {**content, "metadata": {key: value for key, value in content["metadata"].items() if key != "crc32"}}
    return f"{zlib.crc32(json.dumps(told, sort_keys=True).encode()):08x}"


def safetensors(module: str) -> Any:
    """A module of the package, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CheckpointError(
            f"safetensors files need the package 'safetensors', which could not be imported ({error}); install it "
            "with: pip install 'gradient-core[safetensors]'"
        ) from None


def runs_by_size(items: Iterable[Item], size_of: Callable[[Item], int], limit: float) -> Iterator[list[Item]]:
    """Items in order, as many together as fit into the limit; a larger one is alone."""
    run: list[Item] = []
    used = 0
    for item in items:
        size = size_of(item)
        if run and used + size > limit:
            yield run
            run, used = [], 0
        run.append(item)
        used += size
    if run:
        yield run


@contextlib.contextmanager
def only_writer(place: Path, make: Callable[[Path], Any]) -> Iterator[None]:
    """`make` a hidden file or directory and lock it. CheckpointError if another process holds it for 5 s."""
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
    """True if this process could lock the file, and it still has its name."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return place.exists() and os.path.samestat(os.fstat(descriptor), os.stat(place))


def _replace(path: Path, write: Callable[[str], Any]) -> None:
    """Write beside `path`, durably, then take its place: others see the old file or all of the new one."""
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
    """The offset of the file's checksum; None in a file that has none."""
    size = os.fstat(stream.fileno()).st_size
    end = max(0, size - 2 * len(COMMENT + DIGITS))
    found = _bytes_at(stream, end, size - end).rfind(COMMENT)  # not at the very end where the file was cut
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
    """The digits of the CRC-32 of a file whose own digits, at `place`, count as zeros."""
    before = zlib.crc32(DIGITS, crc32_of(stream, 0, place))
    return f"{crc32_of(stream, place + len(DIGITS), crc32=before):08x}".encode()

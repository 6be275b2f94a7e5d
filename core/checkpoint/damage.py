"""Checks that a step's directory has the saved bytes, and reports of damaged files and tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from core.checkpoint.bounded_read import crc32_of, inflates, open_regular, read_bytes
from core.checkpoint.errors import explain
from core.checkpoint.item_content import content_error
from core.checkpoint.manifest import (
    COMMIT_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    CommitRecord,
    FileRecord,
    Manifest,
    ManifestError,
    read_manifest,
)
from core.checkpoint.root_directory import Committed

NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Damage:
    """One file that differs from the saved one."""

    file: str
    what: str  # how it differs
    tensors: tuple[str, ...] = ()  # the items with damaged bytes, as far as known
    rank: int | None = None  # rank that wrote the file

    def __str__(self) -> str:
        by = "" if self.rank is None else f" (written by rank {self.rank})"
        return f"{self.file}{by} {self.what}{self._tensors()}"

    def _tensors(self) -> str:
        if not self.tensors:
            return ""
        shown = ", ".join(f"'{name}'" for name in self.tensors[:NAMES_SHOWN])
        rest = len(self.tensors) - NAMES_SHOWN
        return f"; in the damaged part: {shown}" + (f" and {rest} more" if rest > 0 else "")


def open_manifest(directory: Path) -> tuple[CommitRecord, Manifest] | Damage:
    """Read and check the commit record and the manifest. Return both, or the damage found in them."""
    name = COMMIT_NAME
    try:
        commit = CommitRecord.from_json(read_bytes(directory / COMMIT_NAME))
        by_name = Committed.from_path(directory)
        if by_name is not None and (by_name.step, by_name.sequence) != (commit.step, commit.sequence):
            return Damage(COMMIT_NAME, f"is of step {commit.step}, commit {commit.sequence}, not of this directory")
        name = MANIFEST_NAME
        return commit, read_manifest(commit, read_bytes(directory / MANIFEST_NAME))
    except FileNotFoundError:
        if directory.is_dir():
            return Damage(name, "is missing")
        return Damage(name, "is missing with its whole directory; do all ranks see the same file system?")
    except OSError as error:
        return Damage(name, f"cannot be read: {explain(error, directory)}")
    except ManifestError as error:
        return Damage(name, str(error))


def damage_of(directory: Path, record: FileRecord, manifest: Manifest) -> Damage | None:
    """Read one file from front to back and compare it with the manifest. Return ``None`` if every bit is as saved.

    Items that the manifest lists as tensors must have the listed shape and dtype, since a matching checksum can be
    forged.
    """
    path = directory / record.name
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            is_of_a_saved_size = any(file.size == size for file in manifest.files)
            crc32 = crc32_of(stream) if is_of_a_saved_size else None  # a longer file might never end
            if (size, crc32) != (record.size, record.crc32):
                return _difference(stream, record, size, crc32, manifest.files)
            inflated = tuple(part.name for part in record.segments if inflates(stream, part.offset, part.length))
            if inflated:
                return _damage(record, "would inflate to more than its bytes", inflated)
            return _item_error(stream, record, manifest)
    except FileNotFoundError:
        return _damage(record, "is missing", record.names())
    except OSError as error:
        return _damage(record, f"cannot be read: {explain(error, path)}", record.names())


def shares(files: Sequence[FileRecord], world: int) -> list[list[FileRecord]]:
    """Divide files among ``world`` ranks for a check, balanced by bytes. The result is the same on every rank."""
    parts: list[list[FileRecord]] = [[] for _ in range(world)]
    load = [0] * world
    for record in sorted(files, key=lambda file: (-file.size, file.name)):
        lightest = load.index(min(load))
        parts[lightest].append(record)
        load[lightest] += record.size
    return parts


def _difference(
    stream: BinaryIO, record: FileRecord, size: int, crc32: int | None, files: Iterable[FileRecord]
) -> Damage:
    swapped = next((o.name for o in files if o.name != record.name and (o.size, o.crc32) == (size, crc32)), None)
    if swapped is not None:
        return _damage(record, f"holds what was saved as {swapped}: files were exchanged", record.names())
    if size != record.size:
        kind = "is truncated" if size < record.size else "is too long"
        names = record.names(start=size) if size < record.size else ()
        return _damage(record, f"{kind}: {size} bytes, {record.size} were saved", names)
    bad = [part for part in record.segments if crc32_of(stream, part.offset, part.length) != part.crc32]
    what = f"has other bytes than were saved (checksum {crc32:08x}, saved {record.crc32:08x})"
    return _damage(record, what, tuple(dict.fromkeys(part.name for part in bad)))


def _damage(record: FileRecord, what: str, names: tuple[str, ...]) -> Damage:
    if record.name == METADATA_NAME:
        what += "; it is the index of all tensors"
    return Damage(record.name, what, names, record.rank)


def _item_error(stream: BinaryIO, record: FileRecord, manifest: Manifest) -> Damage | None:
    for part in record.segments:
        if part.box is None:  # not a tensor, or in torch's own index
            continue
        problem = content_error(stream, part.offset, part.length, part.box[1], manifest.tensors[part.name].dtype)
        if problem is not None:
            return _damage(record, f"holds something else: an item {problem}", (part.name,))
    return None

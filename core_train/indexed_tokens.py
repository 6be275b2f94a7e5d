"""Megatron's pair of files, NAME.bin and NAME.idx: tokens that exist already, mapped from the file."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core_train.token_file import TokenFile, TokenFileHeader, cut_off, read_header, write_header

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
# By the code that the index has; the codes for floating-point numbers are left out.
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
READ_TOKENS = 4 << 20


@dataclass(frozen=True)
class Index:
    """Header of an .idx: the dtype of the tokens, how many there are, and how many documents."""

    dtype: str
    tokens: int
    documents: int


def read_index(prefix: Path) -> Index:
    """Read and check NAME.idx against NAME.bin.

    Args:
        prefix: Path of NAME, with or without a suffix.

    Raises:
        OSError: If a file is missing.
        ValueError: If a file is truncated or has another format; the message names it.
    """
    bin_path, idx_path = files_of(prefix)
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise FileNotFoundError(f"--data.megatron {prefix}: there is no file {path} (from {Path.cwd()})")
    head = struct.Struct("<9sQBQQ")
    size = idx_path.stat().st_size
    with idx_path.open("rb") as file:
        start = file.read(head.size)
    if len(start) < head.size or not start.startswith(MAGIC):
        raise ValueError(f"--data.megatron {idx_path} is no index of Megatron's: it does not begin with {MAGIC!r}")
    _, version, code, sequences, marks = head.unpack(start)
    if version != VERSION:
        raise ValueError(f"--data.megatron {idx_path} has version {version} of the format, and {VERSION} is known here")
    if code not in DTYPES:
        raise ValueError(f"--data.megatron {idx_path}: code {code} is no dtype of tokens; known are {sorted(DTYPES)}")
    expected = head.size + 12 * sequences + 8 * marks
    if size != expected:
        known = " (a file with modes, of more than text, is not read)" if size == expected + sequences else ""
        raise ValueError(
            f"--data.megatron {idx_path} has {size:,} bytes, and its {sequences:,} sequences and {marks:,} marks of "
            f"documents take {expected:,}{known}; copy or make the file again"
        )
    lengths = np.memmap(idx_path, "<i4", "r", head.size, (sequences,)) if sequences else np.empty(0, "<i4")
    width = np.dtype(DTYPES[code]).itemsize
    tokens = int(lengths.sum(dtype=np.int64))
    if sequences and int(lengths.min()) < 0:
        raise ValueError(f"--data.megatron {idx_path} holds a sequence of {int(lengths.min())} tokens")
    if bin_path.stat().st_size != tokens * width:
        raise ValueError(
            f"--data.megatron {bin_path} has {bin_path.stat().st_size:,} bytes, and {idx_path.name} counts {tokens:,} "
            f"tokens of {DTYPES[code]}, {tokens * width:,} bytes; copy or make the pair again"
        )
    if sequences:
        pointers = np.memmap(idx_path, "<i8", "r", head.size + 4 * sequences, (sequences,))
        ends = np.cumsum(lengths, dtype=np.int64) * width
        if pointers[0] != 0 or not np.array_equal(pointers[1:], ends[:-1]):
            raise ValueError(
                f"--data.megatron {idx_path}: its sequences are not contiguous in {bin_path.name}, so a window over "
                "them would contain other tokens"
            )
    if tokens == 0:
        raise ValueError(f"--data.megatron {bin_path} holds no token")
    return Index(DTYPES[code], tokens, max(0, marks - 1))  # the first mark is the beginning


def files_of(prefix: Path) -> tuple[Path, Path]:
    """(NAME.bin, NAME.idx)."""
    stem = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
    return stem.with_name(f"{stem.name}.bin"), stem.with_name(f"{stem.name}.idx")


def describe_indexed(prefix: Path, cache: Path) -> Path:
    """Write a description of the pair to `cache`, under a name derived from its tokens.

    The tokens are read once, for their digest and maximum. Later starts identify them by the files' times and sizes.

    Returns:
        The path without a suffix.
    """
    index = read_index(prefix)
    bin_path, idx_path = files_of(prefix)
    times = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in (bin_path, idx_path)]
    stamp = cache / f"indexed-{hashlib.sha256(repr(times).encode()).hexdigest()[:16]}.json"
    header = _known(stamp, index)
    if header is None:
        header = _scanned(bin_path, index)
        write_header(stamp, header)
    path = cache / header.digest[:16]
    write_header(path.with_suffix(".json"), header)
    return path


def _known(stamp: Path, index: Index) -> TokenFileHeader | None:
    try:
        header = read_header(stamp)
    except (OSError, ValueError):
        return None
    return header if (header.tokens, header.dtype) == (index.tokens, index.dtype) else None


def _scanned(bin_path: Path, index: Index) -> TokenFileHeader:
    digest = hashlib.sha256(index.dtype.encode())
    largest = 0
    tokens = np.memmap(bin_path, np.dtype(index.dtype).newbyteorder("<"), "r")
    for start in range(0, len(tokens), READ_TOKENS):
        part = np.asarray(tokens[start : start + READ_TOKENS])
        if int(part.min()) < 0:
            where = start + int(part.argmin())
            raise ValueError(f"--data.megatron {bin_path}: token {where:,} is {int(part.min())}; tokens count from 0")
        largest = max(largest, int(part.max()))
        digest.update(part.data)
    return TokenFileHeader(
        bin_path.stem, index.documents, 0, index.tokens, largest + 1, index.dtype, digest.hexdigest()
    )


def open_indexed(prefix: Path, path: Path, *, validation_fraction: float) -> TokenFile:
    """Map the pair that `describe_indexed` has described in `path`; the last part of it is held out."""
    header = read_header(path.with_suffix(".json"))
    tokens = np.memmap(files_of(prefix)[0], np.dtype(header.dtype).newbyteorder("<"), "r")
    if len(tokens) != header.tokens:
        raise ValueError(f"{files_of(prefix)[0]} held {header.tokens} tokens a moment ago and holds {len(tokens)} now")
    return TokenFile(header, *cut_off(tokens, validation_fraction))

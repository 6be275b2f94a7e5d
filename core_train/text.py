"""The text a job trains on: documents in an order that is the same on every machine with the same files."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.extras import require
from core_plan.job.config import DataOptions

TEXT_SUFFIXES = (".txt", ".md", ".py")
FILE_KINDS = ("json", "csv", "parquet", "text", "arrow")  # the builders of `datasets`
# Installed packages differ between machines, and some systems ship Python without its tests.
NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Text:
    """Files in training order, under a name that can be shown. Each is one document."""

    name: str
    files: tuple[Path, ...]

    def documents(self) -> Iterator[bytes]:
        """Yield the documents in order."""
        for file in self.files:
            yield file.read_bytes()

    def digest(self) -> str:
        """Hash the documents and their order, but not the spelling of paths."""
        digest = hashlib.sha256()
        for document in self.documents():
            digest.update(f"{len(document)}\0".encode())
            digest.update(document)
        return digest.hexdigest()


@dataclass(frozen=True)
class DatasetText(Text):
    """One column of a data set's rows. Each row is one document; a streamed data set is read again each time."""

    rows: Any
    column: str
    limit: int | None

    def documents(self) -> Iterator[bytes]:
        """Yield the column of every row."""
        for number, row in enumerate(self.rows):
            if number == self.limit:
                return
            if self.column not in row:
                raise ValueError(
                    f"--data.column {self.column!r} is not in the rows of {self.name}; they have {', '.join(row)}"
                )
            value = row[self.column]
            if not isinstance(value, str):
                raise ValueError(
                    f"row {number} of {self.name} has a {type(value).__name__} in --data.column {self.column!r}; "
                    "expected text"
                )
            yield value.encode()


def open_source(options: DataOptions) -> Text:
    """Open the text of a job; see ``open_text`` and ``open_dataset``."""
    return open_text(options.text) if options.dataset is None else open_dataset(options)


def open_text(paths: Sequence[Path]) -> Text:
    """Open the given files and directories, or by default the source of the Python standard library.

    Raises:
        OSError: If one is missing.
        ValueError: If all of them are empty.
    """
    text = text_of_paths(paths) if paths else standard_library()
    refused = next((file for file in text.files if not os.access(file, os.R_OK)), None)
    if refused is not None:
        raise PermissionError(f"--data.text {refused} cannot be read by this user")
    if not any(file.stat().st_size for file in text.files):
        raise ValueError(f"the text {text.name} is empty: {len(text.files)} files, 0 bytes")
    return text


def standard_library() -> Text:
    """Return the source of this Python's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(path.relative_to(root), path) for path in root.rglob("*.py")]
    kept = [(name, path) for name, path in files if not NOT_STANDARD_LIBRARY.intersection(name.parts)]
    if not kept:
        raise FileNotFoundError(
            f"this Python has no source of its standard library under {root}; give text files with --data.text"
        )
    return Text("Python standard library", mixed(kept))


def text_of_paths(paths: Sequence[Path]) -> Text:
    """Return the given files, and the text files below the given directories."""
    files: list[tuple[Path, Path]] = []
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
            if not found:
                raise FileNotFoundError(f"--data.text {path} holds no file that ends in {', '.join(TEXT_SUFFIXES)}")
            files.extend((file.relative_to(path), file) for file in found)
        elif path.is_file():
            files.append((Path(path.name), path))
        else:
            raise FileNotFoundError(f"--data.text {path} is neither a file nor a directory (from {Path.cwd()})")
    return Text(", ".join(map(str, paths)), mixed(files))


def mixed(files: Sequence[tuple[Path, Path]]) -> tuple[Path, ...]:
    """Order the paths of (name, path) by a hash of the name, which mixes directories.

    The last part of the text is held out for validation; in sorted order that would be one subject, not a sample.
    A name is relative to the path that was given, so that the same text has one order under every spelling of it.
    """
    ordered = sorted(files, key=lambda file: hashlib.sha256(file[0].as_posix().encode()).digest())
    return tuple(path for _, path in ordered)


def open_dataset(options: DataOptions) -> DatasetText:
    """Open a data set of the package ``datasets``.

    Raises:
        MissingExtra: Without the package.
        ValueError: If the data set cannot be opened or has no text; the message names the option.
    """
    datasets = require("datasets", "--data.dataset", "data")
    datasets.disable_progress_bars()
    try:
        rows = _rows(datasets, options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:  # errors of the package
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"--data.dataset {options.dataset} cannot be opened: {said}") from error
    if isinstance(rows, dict):
        known = ", ".join(rows)
        raise ValueError(f"--data.split {options.split!r} is not in {options.dataset}; it has {known}")
    text = DatasetText(f"{options.dataset} [{options.split}]", (), rows, options.column, options.documents)
    if not any(text.documents()):
        raise ValueError(f"{text.name} is empty: no row has text in --data.column {options.column!r}")
    return text


def _rows(datasets: Any, options: DataOptions) -> Any:
    """Return the rows of the split, or a dictionary of all splits if there is no such split."""
    name = str(options.dataset)
    if any((Path(name) / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
        rows = datasets.load_from_disk(name)
        if isinstance(rows, dict):
            rows = rows.get(options.split, rows)
        return rows.to_iterable_dataset() if options.streaming and not isinstance(rows, dict) else rows
    files = {"data_files": {options.split: [str(file) for file in options.text]}} if name in FILE_KINDS else {}
    return datasets.load_dataset(name, split=options.split, streaming=options.streaming, **files)

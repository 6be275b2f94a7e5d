"""The text a job trains on: documents in an order that is the same on every machine with the same files."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT_SUFFIXES = (".txt", ".md", ".py")
# Installed packages differ between machines, and some systems ship Python without its tests.
NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Text:
    """Documents under a name that can be shown: `files` in training order."""

    name: str
    files: tuple[Path, ...]

    def documents(self) -> Iterator[bytes]:
        """The content of every file, in order."""
        for file in self.files:
            yield file.read_bytes()

    def digest(self) -> str:
        """A hash of the contents and their order. How the paths were spelled is no part of it."""
        return digest_of(self.documents())


def digest_of(documents: Iterable[bytes]) -> str:
    """A hash of documents and their order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{len(document)}\0".encode())
        digest.update(document)
    return digest.hexdigest()


def open_text(paths: Sequence[Path]) -> Text:
    """Read the given files and directories, or by default the source of the Python standard library.

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
    """The source text of this Python's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(path.relative_to(root), path) for path in root.rglob("*.py")]
    kept = [(name, path) for name, path in files if not NOT_STANDARD_LIBRARY.intersection(name.parts)]
    if not kept:
        raise FileNotFoundError(
            f"this Python has no source of its standard library under {root}; give text files with --data.text"
        )
    return Text("Python standard library", mixed(kept))


def text_of_paths(paths: Sequence[Path]) -> Text:
    """Files as they are given, directories searched for text files."""
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
    """(name, path) of files as their paths, in an order that mixes directories and depends on the names alone.

    The last part of the text is held out for validation; in sorted order that would be one subject, not a sample.
    A name is relative to the path that was given, so that the same text has one order under every spelling of it.
    """
    ordered = sorted(files, key=lambda file: hashlib.sha256(file[0].as_posix().encode()).digest())
    return tuple(path for _, path in ordered)

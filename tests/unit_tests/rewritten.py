"""What pytest makes of the asserts in each file of tests, made once for all processes of a run.

Each worker of xdist would rewrite each file that it collects, 8 s in all, and so would each pool of ranks.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

FOLDER = "REWRITTEN_TESTS"  # a variable of the environment: where the processes of a run keep them


def share(folder: Path) -> None:
    """Take a file's code from the folder, or rewrite it and leave it there, wherever pytest would rewrite it."""
    rewrite_file = rewrite._rewrite_test

    def rewrite_once(path: Path, config: pytest.Config) -> tuple[bytes, types.CodeType]:
        name = hashlib.sha256(f"{path} {path.stat().st_mtime_ns}".encode()).hexdigest()
        kept = folder / f"{name}.code"
        if kept.exists():
            return marshal.loads(kept.read_bytes())
        rewritten = rewrite_file(path, config)
        own = kept.with_suffix(f".{os.getpid()}")
        own.write_bytes(marshal.dumps(rewritten))
        own.rename(kept)  # another process sees all of it or nothing
        return rewritten

    rewrite._rewrite_test = rewrite_once


def rewrite_a_part(places: Sequence[str], number: int, parts: int, config: pytest.Config) -> None:
    """Of the files in directories that all workers are about to collect, rewrite those that fall to this one."""
    directories = [Path(place) for place in places if Path(place).is_dir()]
    files = sorted(file.absolute() for directory in directories for file in directory.rglob("test_*.py"))
    for file in files[number::parts]:
        rewrite._rewrite_test(file, config)

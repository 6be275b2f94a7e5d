"""The directory of a run: one that no other run has used, or its own again when it resumes; one process writes there.

runs/default/           the first run of this name
runs/default-2/         the second one
runs/default/run.lock   locked by the process that writes there, for as long as that process lives
runs/latest             a link to the directory of the run that began last
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from core_plan.job.errors import ConfigError

LOCK, CONFIGURATION, CHECKPOINTS, LATEST = "run.lock", "config.json", "checkpoints", "latest"


def check_run_name(name: str) -> None:
    """ConfigError for a name that is no name of a directory: with a separator in it, '.', '..', empty, or too long."""
    odd = name in ("", ".", "..", LATEST) or re.search(r"[/\\]", name) is not None
    if odd or not name.isprintable() or len(name.encode()) > 200:
        raise ConfigError(
            f"--run.name is {name[:300]!r}; it names one directory in --run.directory, so it must not be empty, '.', "
            f"'..' or {LATEST!r}, hold a slash or what cannot be printed, or have more than 200 bytes"
        )


class RunDirectory:
    """A directory that rank 0 alone writes to. A context manager: leaving it unlocks the directory.

    lock: the descriptor of its locked file; None on the other ranks.
    """

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self.lock = lock

    @staticmethod
    def new(parent: Path, name: str) -> RunDirectory:
        """parent/name, or the first of name-2, name-3, ... that no run has used and no process holds."""
        for number in itertools.count(1):
            path = parent / (name if number == 1 else f"{name}-{number}")
            if (lock := _lock(path)) is None:
                continue
            if not (path / CONFIGURATION).exists():
                return RunDirectory(path, lock)
            os.close(lock)
        raise AssertionError("there is always another number")

    @staticmethod
    def again(parent: Path, name: str, saved: str) -> RunDirectory:
        """The directory ``saved`` of a run that resumes under its name; a new one if it resumes under another name.

        ConfigError where another process is writing to it.
        """
        if not re.fullmatch(rf"{re.escape(name)}(-\d+)?", saved):
            return RunDirectory.new(parent, name)
        path = parent / saved
        if (lock := _lock(path)) is None:
            raise ConfigError(
                f"{path} is written to by another run that has not ended: {(path / LOCK).read_text().strip()}. Stop "
                "it, or resume under another --run.name"
            )
        return RunDirectory(path, lock)

    def link_latest(self) -> None:
        """Make the link ``latest``, next to the directory, point to it. OSError where links cannot be made there."""
        link = self.path.with_name(LATEST)
        new = link.with_name(f".{LATEST}.{os.getpid()}")
        new.unlink(missing_ok=True)
        new.symlink_to(self.path.name)
        new.replace(link)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        if self.lock is not None:
            os.close(self.lock)


class RunDisk:
    """Files of a run that are written while it trains: if the disk fails, training continues without them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.has_failed = False

    @contextlib.contextmanager
    def forgiven(self) -> Iterator[None]:
        """Print the first OSError to stderr; drop the others."""
        try:
            yield
        except OSError as error:
            if not self.has_failed:
                self.has_failed = True
                words = f"warning: {self.directory} cannot be written ({error}); training continues without these files"
                print(words, file=sys.stderr, flush=True)


def check_writable(path: Path, flag: str) -> None:
    """Raise ConfigError if ``path`` cannot be created as a directory, or files in it. Leaves nothing behind."""
    place = path
    try:
        if "\0" in str(path):
            raise ValueError("the name holds a NUL")
        place = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
        with tempfile.TemporaryFile(dir=place):
            pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        given, where = (repr(str(each)[:300])[1:-1] for each in (path, place))
        raise ConfigError(f"{flag} {given}: {where} is no directory that this user may write to ({reason})") from None


def _lock(path: Path) -> int | None:
    """Lock a directory, which is created if needed. None if another process holds the lock; the kernel frees a dead
    one's.
    """
    path.mkdir(parents=True, exist_ok=True)
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return lock

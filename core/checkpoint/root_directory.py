"""The root directory of a run's checkpoints: one writer, one directory per step, ``latest``, and leftovers of crashes.

    root/latest                     the name of the newest committed directory, for people and scripts
    root/.lock                      locked by the job that saves here
    root/step_00000040.0007/        step 40, the seventh commit: the last number is the order
    root/.saving-step_00000060-1f3a/    a save in progress, or abandoned
    root/.deleting-step_00000020.0005/  a surplus checkpoint being deleted

A directory gets its name in one rename, after everything in it is durable: that rename is the commit. The newest
checkpoint is decided by the order of commits, not by the step number: a run that went back to step 20 leaves an
obsolete step 40 behind, and must not load it. Saving step 40 again also needs no instant without a committed copy.

This module uses no collectives and no torch: rank 0 of a save calls the functions that change the root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from core.checkpoint.bounded_read import read_bytes
from core.checkpoint.durable_file import sync_directory, write_durably
from core.checkpoint.errors import CheckpointError, explain
from core.checkpoint.save_points import reach
from core.watch.warn_user import warn_user

LATEST, LOCK, TOKEN = "latest", ".lock", ".token"
SAVING, DELETING = ".saving-", ".deleting-"
COMMITTED = re.compile(r"step_(\d{8,})\.(\d{4,})")
RETRY_S = 0.05
LONGEST_NAME = 4096  # bytes read from `latest` and from a lock


@dataclass(frozen=True, slots=True, order=True)
class Committed:
    """Committed directory, parsed from its name and sorted by commit order."""

    sequence: int
    step: int
    path: Path

    @staticmethod
    def from_path(path: Path) -> Committed | None:
        """Parse a path. Return ``None`` if the name does not belong to a commit."""
        match = COMMITTED.fullmatch(path.name)
        return Committed(int(match[2]), int(match[1]), path) if match else None


def committed_name(step: int, sequence: int) -> str:
    """Return the name of a committed directory."""
    return f"step_{step:08d}.{sequence:04d}"


def list_committed(root: Path) -> list[Committed]:
    """List the committed directories, oldest commit first. The list is empty if the root does not exist.

    Raises CheckpointError if the root cannot be read.
    """
    try:
        names = [root / name for name in os.listdir(root)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"Cannot list checkpoints: {explain(error, root)}.") from error
    found = filter(None, map(Committed.from_path, names))
    return sorted(each for each in found if each.path.is_dir())  # False for a link that leads to itself


class SharedHold:
    """Shared lock on a file, which shows other processes that its directory is in use and must not be deleted."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_open_roots: weakref.WeakSet[RootDirectory] = weakref.WeakSet()


class RootDirectory:
    """Rank 0's operations on the root. Every method that changes it requires the lock."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        # Resolve a symlinked root once: repointing the link during a run must not split one save over two directories.
        self.path = Path(os.path.realpath(root))
        self._lock: int | None = None
        _open_roots.add(self)

    def create(self) -> None:
        missing = [place for place in (self.path, *self.path.parents) if not place.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for place in missing:
                sync_directory(place.parent)
        except OSError as error:
            raise self._unwritable(error) from error

    def lock(self, timeout_s: float) -> None:
        """Acquire the exclusive lock of the job that saves here, waiting up to ``timeout_s`` seconds.

        The kernel releases the lock when this process and its forked children have exited, for any reason. Raises
        CheckpointError if another job still has the lock, naming it, or if the file system cannot lock files.
        """
        path = self.path / LOCK
        until = time.monotonic() + timeout_s
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unwritable(error) from error
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(RETRY_S)
                    continue
                holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "an unknown process"
                os.close(descriptor)
                raise CheckpointError(self._refusal(holder)) from None
            except OSError as error:
                os.close(descriptor)
                raise CheckpointError(
                    f"The file system of {self.path} cannot lock files ({explain(error, path)}). Without that, two "
                    "jobs in one root cannot be distinguished; mount it with locks (Lustre: -o flock)."
                ) from error
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{_this_process()} since {since}\n".encode(), 0)
        self._lock = descriptor

    def put_token(self) -> tuple[str, str]:
        """Write a new file that every rank should see, and return its (name, text)."""
        name, text = f"{TOKEN}-{secrets.token_hex(8)}", f"{socket.gethostname()} {secrets.token_hex(8)}"
        try:
            write_durably(self.path / name, text.encode(), 0)
        except OSError as error:
            raise self._unwritable(error) from error
        return name, text

    def sees_token(self, name: str, text: str, timeout_s: float) -> bool:
        """Return ``True`` if this rank sees the file of ``put_token``. Network file systems may show it late."""
        until = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError):
                if (self.path / name).read_text() == text:
                    return True
            if time.monotonic() >= until:
                return False
            time.sleep(RETRY_S)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin(self, step: int) -> Path:
        """Create a directory for a save of ``step``, with a token file that its ranks lock while they write."""
        self.clean_leftovers()
        path = self.path / f"{SAVING}{committed_name(step, self._next_sequence())}-{secrets.token_hex(4)}"
        path.mkdir()
        (path / TOKEN).write_text(path.name)
        sync_directory(path)
        return path

    def next_commit(self, step: int) -> Committed:
        """Return the directory name and sequence number for a commit of ``step``."""
        sequence = self._next_sequence()
        return Committed(sequence, step, self.path / committed_name(step, sequence))

    def commit(self, saving: Path, target: Committed) -> None:
        reach("before rename", 0)
        os.rename(saving, target.path)
        reach("after rename", 0)
        sync_directory(self.path)

    def move_latest(self, target: Committed) -> None:
        reach("before latest", 0)
        self._write_latest(target.path.name, "half a latest")

    def prune(self, keep_last: int, is_intact: Callable[[Path], bool]) -> None:
        """Delete checkpoints older than the newest ``keep_last`` intact ones, oldest first.

        A step that is a symlink is not part of this root: it is neither counted nor deleted.
        """
        reach("before deletion", 0)
        kept = 0
        surplus: list[Committed] = []
        for found in reversed([found for found in list_committed(self.path) if not found.path.is_symlink()]):
            if kept == keep_last:
                surplus.insert(0, found)
            elif is_intact(found.path):
                kept += 1
        for found in surplus:
            doomed = self.path / f"{DELETING}{found.path.name}"
            _remove(doomed)  # left by a crash, if a root was copied back
            # Renamed first, so that no reader sees a partly deleted checkpoint.
            os.rename(found.path, doomed)
            sync_directory(self.path)
            reach("between deletions", 0)
            _delete(doomed)

    def clean_leftovers(self) -> list[str]:
        """Delete leftovers of crashed saves and deletions, and return their names.

        Directories of live processes stay.
        """
        cleaned = []
        for entry in sorted(self.path.iterdir()):
            if entry.name.startswith(DELETING) or (entry.name.startswith(SAVING) and _is_abandoned(entry)):
                with contextlib.suppress(OSError):
                    _remove(entry)
            elif entry.name.startswith(f"{TOKEN}-") or entry.name == f"{LATEST}.tmp":
                entry.unlink(missing_ok=True)
            else:
                continue
            cleaned.append(entry.name)
        self._mend_latest()
        return cleaned

    def _refusal(self, holder: str) -> str:
        if holder.startswith(f"{_this_process()} "):
            return (
                f"This process has another CheckpointSaver open for {self.path}; close that one, or use it "
                "(save_checkpoint takes it as saver=)."
            )
        return (
            f"Another job saves its checkpoints to {self.path}: {holder}. Two jobs in one root would delete each "
            "other's checkpoints; end that job (and its children: they may hold the lock), or give another directory."
        )

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"Checkpoints cannot be saved to {self.path}: {explain(error, self.path)}. "
            "Give a directory that this user may write to."
        )

    def _mend_latest(self) -> None:
        """Repair ``latest`` after a crash between a commit and its update."""
        newest = list_committed(self.path)[-1:]
        if newest and read_latest(self.path) != newest[0].path.name:
            self._write_latest(newest[0].path.name)

    def _write_latest(self, name: str, half_point: str | None = None) -> None:
        """Write the name of a commit to ``latest``.

        If ``latest`` is a directory, warn and leave it, because loads use step names.
        """
        latest = self.path / LATEST
        if latest.is_dir() and not latest.is_symlink():
            warn_user(f"{latest} is a directory, so it names no checkpoint; move it away")
        else:
            write_durably(latest, f"{name}\n".encode(), 0, half_point=half_point)

    def _next_sequence(self) -> int:
        newest = list_committed(self.path)[-1:]
        return newest[0].sequence + 1 if newest else 1


def read_latest(root: Path) -> str | None:
    """Return the content of ``latest``, or None if it cannot be read."""
    try:
        return read_bytes(root / LATEST, LONGEST_NAME).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _is_abandoned(saving: Path) -> bool:
    """Return ``True`` if no process locks the token of this save."""
    try:
        descriptor = os.open(saving / TOKEN, os.O_RDWR | os.O_CLOEXEC)  # NFS wants it writable for an exclusive lock
    except FileNotFoundError:  # crashed between creating the directory and its token: no rank uses it
        return True
    except OSError:  # belongs to another user
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:  # held, or unknown
        return False
    finally:
        os.close(descriptor)


def _delete(directory: Path) -> None:
    files = sorted(directory.iterdir())
    for number, file in enumerate(files):
        if number == (len(files) + 1) // 2:
            reach("during deletion", 0)
        _remove(file)
    directory.rmdir()


def _remove(path: Path) -> None:
    """Delete a path if it exists. For a symlink, only delete the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _forget_locks_in_child() -> None:
    """Release locks in a forked child, such as a data loader, which shares them and may outlive its parent."""
    for root in _open_roots:
        root.unlock()


os.register_at_fork(after_in_child=_forget_locks_in_child)

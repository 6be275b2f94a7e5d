"""Checkpoint errors. The text names the file, the bytes and the next step."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path


class CheckpointError(RuntimeError):
    """Failure to save or load a checkpoint. The message is the same on every participating rank."""


class CheckpointNotFound(CheckpointError):
    """Error for a checkpoint that does not exist."""


class CheckpointDamaged(CheckpointError):
    """Error for a checkpoint whose bytes differ from the saved bytes."""


NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user may still write at ``path`` or its nearest parent, or ``None``."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def explain(error: OSError, path: Path, needed_bytes: int | None = None) -> str:
    """Describe a failed file system call in one sentence: the file, the reason, and the free space of a full disk."""
    where = error.filename if isinstance(error.filename, str) else str(path)
    reason = error.strerror or str(error)
    if error.errno in NO_SPACE:
        free = free_bytes(path)
        needed = "" if needed_bytes is None else f"; {amount(needed_bytes)} are needed"
        has = "" if free is None else f", {amount(free)} are free at {path}"
        return f"cannot write {where}: {reason}{needed}{has}"
    if error.errno in NOT_ALLOWED:
        return f"cannot write {where}: {reason}, for user id {os.geteuid()}"
    return f"{where}: {reason}"


def amount(count: int) -> str:
    """Format a number of bytes exactly and in a readable unit."""
    value, unit = float(count), ""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):  # noqa: B007  the last one stays
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} bytes" if unit == "bytes" else f"{count} bytes ({value:.1f} {unit})"


def code_in(error: Exception) -> str:
    """Describe in one line what the safe unpickler rejected: a function or class name, or its first words."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return str(error).strip().partition("\n")[0] if found is None else found[1]

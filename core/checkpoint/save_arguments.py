"""Checks of a save's arguments on one rank, whose error can then be reported on all ranks."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from typing import Any

FILE_BYTES = 4 << 30  # a rank starts a new data file after this many bytes


def option_error(given: Mapping[str, Any]) -> str | None:
    """Describe the first invalid argument of a CheckpointSaver and its allowed values, or return ``None``."""
    if not isinstance(given["root"], (str, os.PathLike)):
        return f"root={given['root']!r}; it is the path of a directory."
    if (text := keep_last_error(given["keep_last"])) is not None:
        return text
    if not isinstance(given["asynchronous"], bool):
        return f"asynchronous={given['asynchronous']!r}; it is True or False."
    if given["on_error"] not in ("raise", "warn"):
        return f"on_error={given['on_error']!r}; it is 'raise' or 'warn'."
    for name in ("timeout_s", "file_bytes"):
        value = given[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            return f"{name}={value!r} must be a positive number."
    limit = given["snapshot_limit_bytes"]
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit < 0):
        return f"snapshot_limit_bytes={limit!r}; it is a number of bytes, or None for no limit."
    return None


def keep_last_error(keep_last: Any) -> str | None:
    """Return an error text if ``keep_last`` is invalid, else ``None``."""
    if keep_last is None:
        return None
    number = whole_number(keep_last)
    if number is None:
        return f"keep_last={keep_last!r}; expected an integer, or None to keep all."
    return f"keep_last={keep_last}: at least the newest checkpoint is kept; None keeps all." if number < 1 else None


def checked_step(step: Any) -> int:
    """Convert a step to int, accepting numpy integers. Raises ValueError if it is not a non-negative integer."""
    number = whole_number(step)
    if number is None or number < 0:
        raise ValueError(f"step={step!r}; expected an integer of at least 0.")
    return number


def whole_number(value: Any) -> int | None:
    """Convert any integer type to int. Return ``None`` for other values, including bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def checked_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return an independent copy of ``meta``. Raises ValueError if JSON cannot represent it."""
    if not isinstance(meta, Mapping):
        raise ValueError(f"meta is a {type(meta).__name__}; it is a dictionary that JSON can hold.")
    for key, value in meta.items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError) as error:
            raise ValueError(f"meta[{key!r}] cannot be written as JSON: {error}.") from error
    kept: dict[str, Any] = json.loads(json.dumps(dict(meta)))
    return kept

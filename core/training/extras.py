"""Optional packages: imported where they are used, with an error that names the extra that brings them."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtra(ImportError):
    """A package of an extra is needed and is not installed."""


def require(module: str, needed_for: str, extra: str = "train") -> Any:
    """Import `module`, or raise MissingExtra saying what it is needed for and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtra(
            f"{needed_for} needs the package {package!r}, which could not be imported ({error}); "
            f"install it with: pip install 'gradient-core[{extra}]'"
        ) from error

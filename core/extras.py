"""Optional packages: imported on first use, with an error that names the extra to install."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


class MissingExtra(ImportError):
    """A package of an extra is needed and is not installed."""


def require_installed(package: str, needed_for: str, extra: str = "train") -> None:
    """Raise ``MissingExtra`` if ``package`` is not installed. Faster than importing it."""
    if importlib.util.find_spec(package) is None:
        raise _missing(package, needed_for, extra, "it is not installed")


def require(module: str, needed_for: str, extra: str = "train") -> Any:
    """Import an optional module, or raise ``MissingExtra`` with the name of the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module.partition(".")[0], needed_for, extra, str(error)) from error


def _missing(package: str, needed_for: str, extra: str, reason: str) -> MissingExtra:
    return MissingExtra(
        f"{needed_for} needs the package {package!r}, which could not be imported ({reason}); "
        f"install it with: pip install 'gradient-core[{extra}]'"
    )

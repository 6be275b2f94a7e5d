"""Warnings with the user's line, raised from any depth of the package."""

from __future__ import annotations

import sys
import warnings

PACKAGE = __name__.partition(".")[0]


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the file and line of the call that entered this package.

    Args:
        text: The warning.
        category: Type of the warning.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(f"{PACKAGE}."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)

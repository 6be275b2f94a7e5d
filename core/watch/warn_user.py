"""Warnings with the user's line, raised from any depth of the package."""

from __future__ import annotations

import re
import sys
import warnings

OURS = re.compile(r"core(_\w+)?\.")  # modules of this package, and of the packages next to it


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the file and line of the call that entered this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and OURS.match(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)

"""Megatron Core's paths and names over this package's engine: after a change of import lines, a loop runs here.

    import core_compat.megatron as mcore                      instead of  import megatron.core as mcore
    from core_compat.megatron import parallel_state           instead of  from megatron.core import parallel_state

For code that cannot be edited, call ``install()`` before its first import. The other way is to run ``python -m
core_compat.megatron script.py``.
"""

from __future__ import annotations

from typing import Any

from core_compat import install as _install
from core_compat.megatron.names import ABSENT, ALIASES, MODULES, OUTSIDE, OWN

__version__ = "0.16.1"  # Megatron Core's version: programs branch on it

SURFACE = _install.Surface("megatron.core", __name__, MODULES, ABSENT, ALIASES, OUTSIDE, OWN)
_install.register(SURFACE)


def install(*, replace_installed: bool = False) -> None:
    """Install ``megatron.core`` with core_compat.install.install. Call it before the first import of megatron.core."""
    _install.install(SURFACE, replace_installed=replace_installed)


def uninstall() -> None:
    """Undo ``install``."""
    _install.uninstall(SURFACE)


def __getattr__(name: str) -> Any:
    return SURFACE.resolve("", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *SURFACE.all_names(""), *(path for path in SURFACE.paths if "." not in path)})

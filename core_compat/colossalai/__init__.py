"""ColossalAI's paths and names over this package's engine: after a change of import lines, a program runs here.

    import core_compat.colossalai as colossalai               instead of  import colossalai
    from core_compat.colossalai.booster import Booster        instead of  from colossalai.booster import Booster

For code that cannot be edited, call ``install()`` before its first import. The other way is to run ``python -m
core_compat.colossalai script.py``.
"""

from __future__ import annotations

from typing import Any

from core_compat import install as _install
from core_compat.colossalai.names import ABSENT, MODULES

__version__ = "0.5.0"  # ColossalAI's version: programs branch on it

SURFACE = _install.Surface("colossalai", __name__, MODULES, ABSENT, {})
_install.register(SURFACE)


def install(*, replace_installed: bool = False) -> None:
    """Install ``colossalai`` with core_compat.install.install. Call it before the first import of colossalai."""
    _install.install(SURFACE, replace_installed=replace_installed)


def uninstall() -> None:
    """Undo ``install``."""
    _install.uninstall(SURFACE)


def __getattr__(name: str) -> Any:
    return SURFACE.resolve("", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *SURFACE.all_names(""), *(path for path in SURFACE.paths if "." not in path)})

"""Say that a model is about to be cut, wrapped or moved: who compares with the whole model remembers its structure."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

KEEPERS: list[Callable[[nn.Module], None]] = []  # of `python -m core.verify`; else there are none


def about_to_change(model: nn.Module) -> None:
    """Call it with a whole model, before it is cut or sharded in place."""
    for keep in KEEPERS:
        keep(model)

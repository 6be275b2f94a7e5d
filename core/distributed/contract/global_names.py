"""Names in the whole model: what a parameter or buffer of a pipeline stage is called in all layouts.

A module says what its children or parameters are called: module.global_names = {"layers.0": "layers.12"}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

TRANSPARENT = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))  # modules torch puts around others: no names


def global_name(module: nn.Module, local_name: str) -> str:
    """A parameter's or buffer's name in the whole model, from the `global_names` of the modules on its path."""
    rest = local_name.split(".")
    path: list[str] = []
    current: object = module
    while rest:
        names = _names_said_by(current)
        length = next((n for n in range(len(rest), 0, -1) if ".".join(rest[:n]) in names), 0)
        taken = rest[: length or 1]
        path.append(names[".".join(taken)] if length else taken[0])
        rest = rest[len(taken) :]
        for part in taken:
            current = getattr(current, part, None)
    return without_transparent(path)


def namer(module: nn.Module) -> Callable[[str], str]:
    """`global_name` of one module for many names: quick where no module says anything."""
    if any(map(_names_said_by, module.modules())):
        return partial(global_name, module)
    return lambda local_name: without_transparent(local_name.split("."))


def without_transparent(path: Iterable[str]) -> str:
    """The parts of a name, joined, without those of modules that torch puts around others."""
    return ".".join(part for part in path if part not in TRANSPARENT)


def _names_said_by(part: Any) -> Mapping[str, str]:
    """`part.global_names`, without the microseconds that a module takes to say that it has none."""
    said = "global_names" in getattr(part, "__dict__", ()) or hasattr(type(part), "global_names")
    return part.global_names or {} if said else {}

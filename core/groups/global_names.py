"""Global names: names of a pipeline stage's parameters and buffers in the full model, equal in all layouts.

A module declares names for its children or parameters: module.global_names = {"layers.0": "layers.12"}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

TRANSPARENT = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))  # modules torch puts around others: no names


def global_name(module: nn.Module, local_name: str) -> str:
    """Return the name of a parameter or buffer in the full model, from the ``global_names`` of the modules on its
    path.
    """
    rest = local_name.split(".")
    path: list[str] = []
    current: object = module
    while rest:
        names = _declared_names(current)
        length = next((n for n in range(len(rest), 0, -1) if ".".join(rest[:n]) in names), 0)
        prefix = rest[: length or 1]
        path.append(names[".".join(prefix)] if length else prefix[0])
        rest = rest[len(prefix) :]
        for part in prefix:
            current = getattr(current, part, None)
    return without_transparent(path)


def is_numbered(module: nn.Module, local_name: str) -> bool:
    """Return ``True`` if some module on the path declares the innermost number in a name, possibly as unchanged."""
    parts = local_name.split(".")
    last = max((place for place, part in enumerate(parts) if part.isdecimal()), default=len(parts))
    current: object = module
    for place, part in enumerate(parts[: last + 1]):
        names = _declared_names(current)
        if any(".".join(parts[place:end]) in names for end in range(last + 1, len(parts) + 1)):
            return True
        current = getattr(current, part, None)
    return False


def namer(module: nn.Module) -> Callable[[str], str]:
    """Return ``global_name`` of one module as a function of the local name. Fast if no module declares names."""
    if any(map(_declared_names, module.modules())):
        return partial(global_name, module)
    return lambda local_name: without_transparent(local_name.split("."))


def without_transparent(path: Iterable[str]) -> str:
    """Join the parts of a name, without the modules that torch puts around others."""
    return ".".join(part for part in path if part not in TRANSPARENT)


def _declared_names(part: Any) -> Mapping[str, str]:
    """Return ``part.global_names``, without the slow failing attribute lookup of a module that lacks it."""
    is_declared = "global_names" in getattr(part, "__dict__", ()) or hasattr(type(part), "global_names")
    return part.global_names or {} if is_declared else {}


def declare_layer_names(module: nn.Module) -> None:
    """Declare the names of layers of Megatron Core's models in the full model, by ``global_names``. No-op for others.

    These layers have a ``layer_number``, starting at 1. The output layer of a tied model is a copy of the word
    embedding.
    """
    for part in module.modules():
        layers: Any = getattr(part, "layers", None)
        first = getattr(layers[0], "layer_number", None) if isinstance(layers, nn.ModuleList) and layers else None
        names: dict[str, str] = {}
        if isinstance(first, int) and first > 0:
            names = {f"layers.{place}": f"layers.{first - 1 + place}" for place in range(len(layers))}
        if getattr(part, "share_embeddings_and_output_weights", False):
            names["output_layer.weight"] = "embedding.word_embeddings.weight"
        if names and not hasattr(part, "global_names"):
            part.global_names = names

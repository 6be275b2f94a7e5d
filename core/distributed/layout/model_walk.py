"""One walk over a model: its modules, and its parameters by the names that torch gives them."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class ModelWalk(NamedTuple):
    """What a walk has met, in its order."""

    modules: list[nn.Module]
    named: dict[str, nn.Parameter]


def walk_model(module: nn.Module) -> ModelWalk:
    """The same as `modules()` and `named_parameters()` give, in one pass.

    Goes by identity: `named_parameters` hashes every parameter twice, in Python, which takes as long as this all. A
    model that names its parameters itself (activation checkpointing's wrapper leaves its own name out) is asked.
    """
    modules: list[nn.Module] = []
    named: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        modules.append(part)
        path = f"{prefix}." if prefix else ""
        for name, param in part._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                named[path + name] = param
    if getattr(module.named_parameters, "__func__", None) is not nn.Module.named_parameters:
        named = dict(module.named_parameters())
    return ModelWalk(modules, named)

"""Algorithms by name: the ones of this package, and any ``torch.optim`` class by its name or as the class itself.

A label is the string that param groups and checkpoints store for an algorithm: 'adam', 'Adagrad' (a class of
torch.optim), or 'package.module:Class'.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Literal

import torch

NAMED = ("adam", "sgd", "lion", "muon")
_MODULE = "core.optimizer.algorithms.layerwise"
LAYERWISE = {"lamb": f"{_MODULE}:Lamb", "lars": f"{_MODULE}:Lars", "came": f"{_MODULE}:CAME"}
# Modules whose optimizers are known, and the optimizers in them whose update is not elementwise.
KNOWN = ("torch.optim", "transformers.optimization")
NEEDS_SHAPES = ("Adafactor", "Muon")
# Classes that need a closure or sparse gradients; a step here has neither.
TORCH_REFUSED = {"LBFGS": "its step needs a closure", "SparseAdam": "gradients in a buffer are dense"}

Algorithm = str | type[torch.optim.Optimizer]
Scope = Literal["element", "parameter", "group"]


def resolve(algorithm: Algorithm) -> Algorithm:
    """Return the name in NAMED, or the class, that a name, label or class selects.

    Raises ValueError if it is not an optimizer, or needs a closure or sparse gradients.
    """
    if isinstance(algorithm, str) and algorithm in NAMED:
        return algorithm
    found: Any = algorithm
    if isinstance(algorithm, str):
        algorithm = LAYERWISE.get(algorithm, algorithm)
        module, _, qualname = algorithm.rpartition(":")
        if module:
            found = importlib.import_module(module)
            for part in qualname.split("."):
                found = getattr(found, part)
        else:
            found = getattr(torch.optim, algorithm, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)) or found is torch.optim.Optimizer:
        hint = "; AdamW is 'adam' with decoupled_weight_decay=True, the default" if algorithm == "adamw" else ""
        raise ValueError(
            f"optimizer {algorithm!r} is not one of {', '.join((*NAMED, *LAYERWISE))}, nor the name of a torch.optim "
            f"class such as 'Adagrad', nor a subclass of torch.optim.Optimizer{hint}"
        )
    if found.__module__.startswith("torch.optim") and found.__name__ in TORCH_REFUSED:
        raise ValueError(f"optimizer {found.__name__} cannot be used here: {TORCH_REFUSED[found.__name__]}")
    return found


def label(algorithm: Algorithm) -> str:
    """Return an algorithm's label for groups and checkpoints, a string that ``resolve`` accepts.

    Raises ValueError for an unusable optimizer, and for a class defined in a function, which other ranks could not
    import.
    """
    found = resolve(algorithm)
    if isinstance(found, str):
        return found
    if found.__module__.startswith("torch.optim") and getattr(torch.optim, found.__name__, None) is found:
        return found.__name__
    if "<locals>" in found.__qualname__:
        raise ValueError(
            f"optimizer {found.__qualname__} is defined in a function, where other ranks and checkpoints cannot "
            "find it; define it in a module"
        )
    return f"{found.__module__}:{found.__qualname__}"


def update_scope(algorithm: Algorithm) -> Scope:
    """Return the scope of gradients that one element's update depends on.

    The scope is "element"; "parameter" if the algorithm needs unsplit parameters in their shape; or "group" if it also
    needs all of them in one call. Classes of torch, transformers' Adafactor, classes of this package, and subclasses
    with the same ``step``, are known. Other classes declare it: ``needs_shapes = False`` if the update is elementwise,
    or ``needs_shapes = True`` with ``couples_parameters = False`` if it needs the full parameter. A class without a
    declaration may compute one number from several parameters, as Prodigy and D-adaptation do, so it gets the scope
    "group", which is correct for any algorithm.

    Raises:
        ValueError: If it is not an optimizer, or needs a closure or sparse gradients.
    """
    found = resolve(algorithm)
    if isinstance(found, str):
        return "parameter" if found == "muon" else "element"
    known = _known_class(found)
    declared = getattr(found, "needs_shapes", None)
    if declared is False:
        return "element"
    if declared:
        uncoupled = known is not None or getattr(found, "couples_parameters", None) is False
        return "parameter" if uncoupled else "group"
    if known is None:
        return "group"
    return "parameter" if known.__name__ in NEEDS_SHAPES else "element"


def _known_class(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer] | None:
    """Return the known class whose ``step`` this class runs, the class itself if it is defined here, or ``None``."""
    for base in cls.__mro__:
        if base.__module__.startswith(KNOWN) and base is not torch.optim.Optimizer:
            step: Any = base.__dict__.get("step")
            if step is not None and inspect.unwrap(step) is inspect.unwrap(cls.step):
                return base
    return cls if cls.__module__.startswith("core.optimizer.") else None


def undeclared(algorithm: Algorithm) -> str:
    """Return the error text for a class of scope "group" whose parameters are on several ranks."""
    found = resolve(algorithm)
    name = found if isinstance(found, str) else found.__name__
    return (
        f"{name} does not say which gradients one element's update depends on, and this rank has only a part of its "
        f"parameters. Set `{name}.needs_shapes = False` if it updates each element alone (Adam, SGD and their kin), or "
        f"`{name}.needs_shapes = True` and `{name}.couples_parameters = False` if each parameter alone (LAMB, LARS, "
        "Muon). One that makes a number of several parameters (Prodigy, D-adaptation) trains where each rank has all "
        "of them: with no_shard, TorchDDPPlugin or GeminiPlugin(strict_ddp_mode=True)"
    )

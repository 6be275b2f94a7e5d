"""The algorithms by name: our own, and any `torch.optim` class, by its name or as the class itself.

A label is what a param group and a checkpoint hold of an algorithm: 'adam', 'Adagrad' (a class of torch.optim), or
'package.module:Class'.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

NAMED = ("adam", "sgd", "lion", "muon")
_MODULE = "core.optimizer.algorithms.layerwise"
LAYERWISE = {"lamb": f"{_MODULE}:Lamb", "lars": f"{_MODULE}:Lars", "came": f"{_MODULE}:CAME"}
# Modules whose optimizers are known; those of them that look at the parameter, and not at each element alone.
KNOWN = ("torch.optim", "transformers.optimization")
NEEDS_SHAPES = ("Adafactor", "Muon")
# They call for a closure or for sparse gradients; a step here has neither.
TORCH_REFUSED = {"LBFGS": "its step needs a closure", "SparseAdam": "gradients in a buffer are dense"}

Algorithm = str | type[torch.optim.Optimizer]


def resolve(algorithm: Algorithm) -> Algorithm:
    """One of NAMED, or the class that a name, label or class stands for. ValueError on what is none of them."""
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
    """The string for an algorithm that `resolve` understands, for groups and checkpoints."""
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


def algorithm_needs_shapes(algorithm: Algorithm) -> bool:
    """True if it must see whole parameters in their shape. Your own class says so with `needs_shapes = True`."""
    found = resolve(algorithm)
    if isinstance(found, str):
        return found == "muon"
    declared = getattr(found, "needs_shapes", None)
    if declared is not None:
        return bool(declared)
    return found.__module__.startswith(KNOWN) and found.__name__ in NEEDS_SHAPES

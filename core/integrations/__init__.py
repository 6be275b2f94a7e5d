"""Adapters: loops of accelerate, Transformers' Trainer and Lightning Fabric over this package's wrapper and optimizers.

Each class derives from the one whose name it has, and is imported here in its place. The package that it derives from
must be installed.
"""

from __future__ import annotations

import importlib
from typing import Any

from core.integrations.loop_optimizer import LoopOptimizer

_PLACES = {"Accelerator": "for_accelerate", "Trainer": "for_transformers", "FabricStrategy": "for_fabric"}

__all__ = ["LoopOptimizer"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; known are {', '.join(_PLACES)}")
    return importlib.import_module(f"core.integrations.{_PLACES[name]}").derived()

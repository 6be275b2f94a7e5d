"""Adapters: loops of accelerate, Transformers' Trainer, TRL and Lightning Fabric over our wrapper and optimizers.

Each class derives from the one whose name it has, and is imported here in its place; ``over`` derives one from any
other Trainer. The package that it derives from must be installed.
"""

from __future__ import annotations

import importlib
from typing import Any

from core.extras import require
from core.integrations.for_transformers import over
from core.integrations.loop_optimizer import LoopOptimizer

_PLACES = {"Accelerator": "for_accelerate", "Trainer": "for_transformers", "FabricStrategy": "for_fabric"}
_OF_TRL = ("SFTTrainer", "DPOTrainer", "RewardTrainer")

__all__ = ["LoopOptimizer", "over"]


def __getattr__(name: str) -> Any:
    if name in _OF_TRL:
        return over(getattr(require("trl", f"core.integrations.{name}", "trl"), name))
    if name not in _PLACES:
        known = ", ".join((*_PLACES, *_OF_TRL, *__all__))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; known are {known}")
    return importlib.import_module(f"core.integrations.{_PLACES[name]}").derived()

"""Booster: one training loop for every form of parallelism, selected by a plugin. The names are ColossalAI's."""

from core.booster.accelerator import Accelerator
from core.booster.booster import Booster
from core.booster.coordinator import DistCoordinator

__all__ = ["Accelerator", "Booster", "DistCoordinator"]

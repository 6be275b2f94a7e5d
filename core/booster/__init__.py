"""Booster: one training loop for every way of training on several ranks, chosen by a plugin. Names are ColossalAI's."""

from core.booster.accelerator import Accelerator
from core.booster.booster import Booster
from core.booster.coordinator import DistCoordinator

__all__ = ["Accelerator", "Booster", "DistCoordinator"]

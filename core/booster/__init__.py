"""The Booster: one loop for every way of training on several ranks; a plugin says which way. Names are ColossalAI's."""

from core.booster.accelerator import Accelerator
from core.booster.booster import Booster
from core.booster.coordinator import DistCoordinator

__all__ = ["Accelerator", "Booster", "DistCoordinator"]

"""`core.timers`: timers by name."""

from core.compat.megatron.faces.timers import Timer, Timers

__all__ = ["Timer", "Timers"]

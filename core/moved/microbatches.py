"""`core.microbatches`: how many microbatches a step has."""

from core.compat.megatron.faces.microbatches import MicrobatchCalculator

__all__ = ["MicrobatchCalculator"]

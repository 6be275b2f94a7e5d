"""Models built of the parts in core.transformer."""

from core.models.gpt import GPTModel

__all__ = ["GPTModel"]

"""Models built from the blocks in core.transformer."""

from core.models.gpt import GPTModel

__all__ = ["GPTModel"]

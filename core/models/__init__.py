"""The GPT, its stack of layers, and one layer, built from the parts in core.transformer and core.moe."""

from core.models.gpt import GPTModel
from core.models.transformer_block import TransformerBlock
from core.models.transformer_layer import TransformerLayer

__all__ = ["GPTModel", "TransformerBlock", "TransformerLayer"]

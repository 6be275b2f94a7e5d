"""Building blocks of a transformer: configuration, norms, attention, MLP, layers and embeddings."""

from core.transformer.attention import SelfAttention
from core.transformer.language_model_embedding import LanguageModelEmbedding
from core.transformer.mlp import MLP
from core.transformer.norms import LayerNorm, RMSNorm, build_norm
from core.transformer.rotary import RotaryEmbedding
from core.transformer.transformer_block import TransformerBlock
from core.transformer.transformer_config import TransformerConfig
from core.transformer.transformer_layer import TransformerLayer

__all__ = [
    "MLP",
    "LanguageModelEmbedding",
    "LayerNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "SelfAttention",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerLayer",
    "build_norm",
]

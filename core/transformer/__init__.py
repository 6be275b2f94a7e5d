"""Parts of a transformer layer: configuration, norms, attention, MLP and embeddings."""

from core.transformer.attention import SelfAttention
from core.transformer.language_model_embedding import LanguageModelEmbedding
from core.transformer.mlp import MLP
from core.transformer.norms import LayerNorm, RMSNorm, build_norm
from core.transformer.rotary import RotaryEmbedding
from core.transformer.transformer_config import TransformerConfig

__all__ = [
    "MLP",
    "LanguageModelEmbedding",
    "LayerNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "SelfAttention",
    "TransformerConfig",
    "build_norm",
]

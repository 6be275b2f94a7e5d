"""Megatron's enumerations. Here a model is a decoder, attention is causal, and torch chooses its kernel."""

from enum import Enum

ModelType = Enum("ModelType", "encoder_or_decoder")
LayerType = Enum("LayerType", "embedding loss encoder decoder mtp")
AttnType = Enum("AttnType", "self_attn cross_attn")
AttnMaskType = Enum("AttnMaskType", "padding causal no_mask padding_causal arbitrary causal_bottom_right")
AttnBackend = Enum("AttnBackend", "flash fused unfused local auto")


class Fp8Recipe(str, Enum):
    """Scaling of 8-bit products."""

    delayed, tensorwise, mxfp8, blockwise, custom = "delayed", "tensorwise", "mxfp8", "blockwise", "custom"

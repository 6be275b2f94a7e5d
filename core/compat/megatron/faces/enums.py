"""Megatron's enumerations."""

from __future__ import annotations

import enum


class ModelType(enum.Enum):
    """What a model is made of; a decoder alone here."""

    encoder_or_decoder = 1


class LayerType(enum.Enum):
    """What stands in a pipeline stage."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5


class AttnType(enum.Enum):
    """Whom a position attends to."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """Which positions are seen; `causal` here."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


class AttnBackend(enum.Enum):
    """Whose attention kernel; torch chooses here."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5


class Fp8Recipe(str, enum.Enum):
    """How 8-bit products are scaled; not built here."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"
    custom = "custom"

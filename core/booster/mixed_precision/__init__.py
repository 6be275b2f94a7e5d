"""Mixed precisions by name, for plugins that do not control the precision."""

from __future__ import annotations

from core.booster.mixed_precision.autocast import BF16MixedPrecision
from core.booster.mixed_precision.fp8 import FP8MixedPrecision
from core.booster.mixed_precision.fp16 import FP16TorchMixedPrecision
from core.booster.mixed_precision.loss_scaled_optimizer import TorchAMPOptimizer
from core.booster.mixed_precision.mixed_precision_base import FP32MixedPrecision, MixedPrecision

__all__ = [
    "BF16MixedPrecision",
    "FP8MixedPrecision",
    "FP16TorchMixedPrecision",
    "FP32MixedPrecision",
    "MixedPrecision",
    "TorchAMPOptimizer",
    "mixed_precision_factory",
]

PRECISIONS: dict[str, type[MixedPrecision]] = {
    "fp32": FP32MixedPrecision,
    "fp16": FP16TorchMixedPrecision,
    "bf16": BF16MixedPrecision,
    "fp8": FP8MixedPrecision,
}


def mixed_precision_factory(mixed_precision_type: str) -> MixedPrecision:
    """Create a mixed precision by its name in PRECISIONS, with default options.

    Raises:
        ValueError: If the name is unknown.
    """
    if mixed_precision_type in ("fp16_naive", "fp16_apex"):
        raise ValueError(f"mixed precision {mixed_precision_type!r} of ColossalAI is not here; use 'fp16'")
    if mixed_precision_type not in PRECISIONS:
        raise ValueError(f"mixed precision {mixed_precision_type!r} is none of {sorted(PRECISIONS)}")
    return PRECISIONS[mixed_precision_type]()

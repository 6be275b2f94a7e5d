"""fp16: autocast with a dynamic loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from core.booster.mixed_precision.autocast import AutocastModel, under_autocast
from core.booster.mixed_precision.loss_scaled_optimizer import TorchAMPOptimizer
from core.booster.mixed_precision.mixed_precision_base import Configured, MixedPrecision
from core.optimizer.loss_scaler import DynamicLossScaler


class FP16TorchMixedPrecision(MixedPrecision):
    """Computes in fp16 through autocast, with a dynamic loss scale.

    The first four arguments and their defaults are those of torch and ColossalAI. The other defaults reproduce their
    behavior.

    Args:
        init_scale (float, optional): Initial loss scale.
        growth_factor (float, optional): Factor of the scale after ``growth_interval`` steps without overflow.
        backoff_factor (float, optional): Factor of the scale after an overflow.
        growth_interval (int, optional): Number of steps without overflow before the scale grows.
        min_scale (float, optional): Lower limit of the scale.
        max_scale (float, optional): Upper limit of the scale. Defaults to the largest fp32 number.
        hysteresis (int, optional): Number of overflows since the last growth at which the scale is first reduced.

    Raises:
        ValueError: If a number is out of its range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        min_scale: float = 2.0**-24,
        max_scale: float | None = None,
        hysteresis: int = 1,
    ) -> None:
        self.scaler_options: dict[str, Any] = {
            "initial_scale": init_scale,
            "min_scale": min_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "max_scale": max_scale,
        }
        self.new_scaler()  # raises for numbers out of range

    def new_scaler(self) -> DynamicLossScaler:
        """Create a loss scaler with these options."""
        return DynamicLossScaler(**self.scaler_options)

    def configure(
        self, model: nn.Module, optimizer: Any = None, criterion: Callable[..., Any] | None = None
    ) -> Configured:
        """Wrap the model and the criterion in autocast, and the optimizer with the loss scale.

        See ``MixedPrecision.configure`` for the arguments.
        """
        boosted = AutocastModel(model, torch.float16)
        if optimizer is not None:
            optimizer = TorchAMPOptimizer(optimizer, self.new_scaler())
        if criterion is not None:
            criterion = under_autocast(criterion, boosted, torch.float16)
        return boosted, optimizer, criterion

"""Models and criteria under autocast: parameters stay in fp32, and matmuls run in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from core.booster.mixed_precision.mixed_precision_base import (
    Configured,
    MixedPrecision,
    as_wrapped_optimizer,
)
from core.interface import ModelWrapper


class AutocastModel(ModelWrapper):
    """Model, or criterion module, whose forward runs under autocast.

    ``device_type`` defaults to the device of the module's parameters at each call.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device_type: str | None = None) -> None:
        super().__init__(module)
        self.dtype = dtype
        self._device_type = device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type or _device_type(self), self.dtype):
            return self.module(*args, **kwargs)


def under_autocast(criterion: Callable[..., Any], model: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a criterion that runs under autocast on the model's device."""
    if isinstance(criterion, nn.Module):
        return AutocastModel(criterion, dtype, _device_type(model))

    @wraps(criterion)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(_device_type(model), dtype):
            return criterion(*args, **kwargs)

    return run


class BF16MixedPrecision(MixedPrecision):
    """Computes in bf16 through autocast. bf16 has the range of fp32, so the loss needs no scale."""

    def configure(
        self, model: nn.Module, optimizer: Any = None, criterion: Callable[..., Any] | None = None
    ) -> Configured:
        """Wrap the model and the criterion in autocast. See ``MixedPrecision.configure``."""
        boosted = AutocastModel(model, torch.bfloat16)
        if criterion is not None:
            criterion = under_autocast(criterion, boosted, torch.bfloat16)
        return boosted, as_wrapped_optimizer(optimizer), criterion


def _device_type(model: nn.Module) -> str:
    first = next(model.parameters(), None)
    return "cpu" if first is None else str(first.device.type)

"""Models and criteria that compute under autocast: parameters stay fp32, matrix products run in 16 bits."""

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
    """A model, or a criterion that is a module, whose forward runs under autocast.

    device_type: of the autocast; None for that of the module's parameters, wherever they lie.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device_type: str | None = None) -> None:
        super().__init__(module)
        self.dtype = dtype
        self._device_type = device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward under autocast."""
        with torch.autocast(self._device_type or _device_type(self), self.dtype):
            return self.module(*args, **kwargs)


def under_autocast(criterion: Callable[..., Any], model: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    """A criterion, module or function, that runs under the model's autocast."""
    if isinstance(criterion, nn.Module):
        return AutocastModel(criterion, dtype, _device_type(model))

    @wraps(criterion)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(_device_type(model), dtype):
            return criterion(*args, **kwargs)

    return run


class BF16MixedPrecision(MixedPrecision):
    """bf16 by autocast. bf16 has fp32's range, so the loss needs no scale."""

    def configure(
        self, model: nn.Module, optimizer: Any = None, criterion: Callable[..., Any] | None = None
    ) -> Configured:
        """Autocast around the model and the criterion; the optimizer is only wrapped."""
        boosted = AutocastModel(model, torch.bfloat16)
        if criterion is not None:
            criterion = under_autocast(criterion, boosted, torch.bfloat16)
        return boosted, as_wrapped_optimizer(optimizer), criterion


def _device_type(model: nn.Module) -> str:
    first = next(model.parameters(), None)
    return "cpu" if first is None else str(first.device.type)

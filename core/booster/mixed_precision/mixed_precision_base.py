"""MixedPrecision: in which precision a model computes, where its plugin does not decide that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn

from core.interface import ModelWrapper, OptimizerWrapper

Configured = tuple[nn.Module, Any, Callable[..., Any] | None]


class MixedPrecision(ABC):
    """Turns a model, optimizer and criterion into ones that compute in another precision."""

    @abstractmethod
    def configure(
        self, model: nn.Module, optimizer: Any = None, criterion: Callable[..., Any] | None = None
    ) -> Configured:
        """The same three, wrapped; what was None stays None. `model` may already be a plugin's wrapper."""


class FP32MixedPrecision(MixedPrecision):
    """No mixed precision: everything computes in the dtype of the parameters."""

    def configure(
        self, model: nn.Module, optimizer: Any = None, criterion: Callable[..., Any] | None = None
    ) -> Configured:
        """Wraps, and changes nothing."""
        return as_wrapped(model), as_wrapped_optimizer(optimizer), criterion


def as_wrapped(model: nn.Module) -> ModelWrapper:
    """The model in a ModelWrapper, once."""
    return model if isinstance(model, ModelWrapper) else ModelWrapper(model)


def as_wrapped_optimizer(optimizer: Any) -> OptimizerWrapper | None:
    """The optimizer in an OptimizerWrapper, once; None stays None."""
    return optimizer if optimizer is None or isinstance(optimizer, OptimizerWrapper) else OptimizerWrapper(optimizer)

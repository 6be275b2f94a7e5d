"""MixedPrecision: the precision in which a model computes, if its plugin does not control it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn

from core.interface import ModelWrapper, OptimizerWrapper

Configured = tuple[nn.Module, Any, Callable[..., Any] | None]


class MixedPrecision(ABC):
    """Base class of precisions, which wrap a model, an optimizer and a criterion."""

    @abstractmethod
    def configure(
        self, model: nn.Module, optimizer: Any = None, criterion: Callable[..., Any] | None = None
    ) -> Configured:
        """Wrap a model, an optimizer and a criterion. ``None`` stays ``None``.

        Args:
            model (Module): The model, or a plugin's wrapper of it.
            optimizer (Optimizer, optional): The optimizer.
            criterion (Callable[..., Any], optional): The loss function.

        Returns:
            (model, optimizer, criterion)
        """


class FP32MixedPrecision(MixedPrecision):
    """No mixed precision: all operations run in the parameters' dtype."""

    def configure(
        self, model: nn.Module, optimizer: Any = None, criterion: Callable[..., Any] | None = None
    ) -> Configured:
        """Wrap the model and the optimizer without changing them. See ``MixedPrecision.configure``."""
        return as_wrapped(model), as_wrapped_optimizer(optimizer), criterion


def as_wrapped(model: nn.Module) -> ModelWrapper:
    """Wrap a model in a ModelWrapper, unless it is one."""
    return model if isinstance(model, ModelWrapper) else ModelWrapper(model)


def as_wrapped_optimizer(optimizer: Any) -> OptimizerWrapper | None:
    """Wrap an optimizer in an OptimizerWrapper, unless it is one. None stays None."""
    return optimizer if optimizer is None or isinstance(optimizer, OptimizerWrapper) else OptimizerWrapper(optimizer)

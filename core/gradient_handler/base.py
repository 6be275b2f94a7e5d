"""Base class of gradient handlers, called once per step after backward and before clipping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class BaseGradientHandler(ABC):
    """Base class of reductions that run before the optimizer's step. Subclass it for a custom reduction.

        class HalveGradients(BaseGradientHandler):
            def handle_gradient(self):
                for param in self._model.parameters():
                    param.grad.mul_(0.5)

    Args:
        model (Module): Model with the gradients.
        optimizer (Optimizer): Optimizer of the parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model = model
        self._optimizer = optimizer

    @abstractmethod
    def handle_gradient(self) -> None:
        """Reduce the gradients in place. Every rank of the groups involved must call it."""

"""Base class of gradient handlers: called once a step, after backward and before clipping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class BaseGradientHandler(ABC):
    """Makes the gradients of a model whole before the optimizer's step. Subclass it for a reduction of your own.

    model: where the gradients accumulate. optimizer: what updates the parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model = model
        self._optimizer = optimizer

    @abstractmethod
    def handle_gradient(self) -> None:
        """Reduce the gradients, in place. Collective: every rank of the groups concerned calls it."""

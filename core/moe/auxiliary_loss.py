"""A loss that is in no sum: it enters in backward, with the gradient of the activation it is attached to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """Passes an activation on, and in backward starts a gradient in a loss that is in no sum.

    The loss gets the gradient that the caller's own loss is given: with n microbatches, each divided by n, call
    `MoEAuxLossAutoScaler.set_loss_scale(1 / n)`; with a loss scaler, its scale too. Read in backward; 1 at the start.
    """

    main_loss_backward_scale: float | Tensor = 1.0

    @staticmethod
    def forward(ctx: Any, activation: Tensor, aux_loss: Tensor) -> Tensor:
        """The activation, unchanged."""
        ctx.like = aux_loss
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The activation's gradient, and the scale as the loss's."""
        return grad, torch.ones_like(ctx.like) * MoEAuxLossAutoScaler.main_loss_backward_scale

    @staticmethod
    def set_loss_scale(scale: float | Tensor) -> None:
        """The gradient of auxiliary losses from the next backward on: that of the caller's loss."""
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale


@contextmanager
def auxiliary_loss_scale(scale: float | Tensor) -> Iterator[None]:
    """Inside the block backwards weigh auxiliary losses like the caller its own: 1 / microbatches, times any scaler."""
    before = MoEAuxLossAutoScaler.main_loss_backward_scale
    MoEAuxLossAutoScaler.set_loss_scale(scale)
    try:
        yield
    finally:
        MoEAuxLossAutoScaler.set_loss_scale(before)

"""Auxiliary loss that is only added in backward, through the gradient of an activation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """Autograd function that passes an activation through and starts the gradient of an auxiliary loss in backward.

    The auxiliary loss is in no sum, so it needs the same gradient scale as the main loss. With n microbatches, each
    divided by n, call ``MoEAuxLossAutoScaler.set_loss_scale(1 / n)``; with a loss scaler, multiply by its scale. The
    scale is read in backward and is 1 by default.
    """

    main_loss_backward_scale: float | Tensor = 1.0

    @staticmethod
    def forward(ctx: Any, activation: Tensor, aux_loss: Tensor) -> Tensor:
        """Return the activation unchanged."""
        ctx.like = aux_loss
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the activation's gradient, and the scale as the gradient of the loss."""
        return grad, torch.ones_like(ctx.like) * MoEAuxLossAutoScaler.main_loss_backward_scale

    @staticmethod
    def set_loss_scale(scale: float | Tensor) -> None:
        """Set the gradient of auxiliary losses, equal to the main loss's gradient, for all following backward
        passes.
        """
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale


@contextmanager
def auxiliary_loss_scale(scale: float | Tensor) -> Iterator[None]:
    """Set the gradient of auxiliary losses for backward passes inside the block.

    Args:
        scale (float | Tensor): Gradient of the main loss: 1 / microbatches, multiplied by any loss scale.
    """
    before = MoEAuxLossAutoScaler.main_loss_backward_scale
    MoEAuxLossAutoScaler.set_loss_scale(scale)
    try:
        yield
    finally:
        MoEAuxLossAutoScaler.set_loss_scale(before)

"""LayerNorm and RMSNorm over the last dimension, tagged for the reduction of their gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.model_parallel_config import ModelParallelConfig
from core.tensor_parallel.unsaved_output import computed_again


class LayerNorm(nn.Module):
    """Layer normalization: (x - mean) / std * weight + bias.

    Under sequence parallelism it only sees this rank's positions, so its gradients are partial and are summed over tp.

    Args:
        config (ModelParallelConfig): Model configuration.
        size (int): Size of the last dimension.
        eps (float, optional): Added to the variance.
        recompute (bool, optional): Save only the input, and recompute the output in backward.
    """

    def __init__(self, config: ModelParallelConfig, size: int, eps: float = 1e-5, *, recompute: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.recompute = recompute  # save the input alone, so that the output need not be saved
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, input_: Tensor) -> Tensor:
        """Normalize the input, [..., size]."""
        shape, eps = self.weight.shape, self.eps
        if self.recompute and self.training:
            args = input_, self.weight, self.bias
            return computed_again(lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, eps), *args)
        return F.layer_norm(input_, shape, self.weight, self.bias, eps)


class RMSNorm(nn.Module):
    """RMS normalization: x / root mean square * weight (arXiv 1910.07467).

    Under sequence parallelism it only sees this rank's positions, so its gradient is partial and is summed over tp.

    Args:
        config (ModelParallelConfig): Model configuration.
        size (int): Size of the last dimension.
        eps (float, optional): Added to the mean square.
        recompute (bool, optional): Save only the input, and recompute the output in backward.
    """

    def __init__(self, config: ModelParallelConfig, size: int, eps: float = 1e-5, *, recompute: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.recompute = recompute  # save the input alone, so that the output need not be saved
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, input_: Tensor) -> Tensor:
        """Normalize the input, [..., size]."""
        shape, eps = self.weight.shape, self.eps
        if self.recompute and self.training:
            return computed_again(lambda x, weight: F.rms_norm(x, shape, weight, eps), input_, self.weight)
        # On a CPU rms_norm reads its input twice. One view sums both gradients before they are passed on, as happens
        # when the norm is recomputed.
        return F.rms_norm(input_.view_as(input_), shape, self.weight, eps)


def build_norm(config: ModelParallelConfig, size: int, *, recompute: bool = False) -> nn.Module:
    """Create the norm named by ``config.normalization``.

    Args:
        config (ModelParallelConfig): Model configuration.
        size (int): Size of the last dimension.
        recompute (bool, optional): Recompute the output in backward.
    """
    kind = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[getattr(config, "normalization", "LayerNorm")]
    return kind(config, size, getattr(config, "layernorm_epsilon", 1e-5), recompute=recompute)

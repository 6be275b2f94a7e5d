"""LayerNorm and RMSNorm over the last dimension, with the tag that says what their gradients need."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.model_parallel_config import ModelParallelConfig


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias. Under sequence parallelism it sees some positions: gradients are partial."""

    def __init__(self, config: ModelParallelConfig, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, input_: Tensor) -> Tensor:
        """Normalised input, [..., size]."""
        return F.layer_norm(input_, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / root mean square * weight (arXiv 1910.07467). Under sequence parallelism its gradient is partial."""

    def __init__(self, config: ModelParallelConfig, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, input_: Tensor) -> Tensor:
        """Normalised input, [..., size]."""
        return F.rms_norm(input_, self.weight.shape, self.weight, self.eps)


def build_norm(config: ModelParallelConfig, size: int) -> nn.Module:
    """The norm that `config.normalization` names."""
    kind = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[getattr(config, "normalization", "LayerNorm")]
    return kind(config, size, getattr(config, "layernorm_epsilon", 1e-5))

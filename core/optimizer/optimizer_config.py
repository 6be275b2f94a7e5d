"""OptimizerConfig: which algorithm updates the parameters, and how. Frozen; nothing here writes to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ALGORITHMS = ("adam", "sgd")


@dataclass(frozen=True)
class OptimizerConfig:
    """Names and defaults of Megatron Core.

    optimizer: 'adam' or 'sgd'.
    lr, min_lr: the learning rate groups start with, and the one a scheduler ends at; lr must be set.
    weight_decay: of parameters that decay; biases and one-dimensional parameters do not, by default.
    decoupled_weight_decay: AdamW's decay of the weights themselves; False adds it to the gradient, as Adam did. SGD
        always adds it to the gradient.
    adam_beta1, adam_beta2, adam_eps, sgd_momentum: the algorithm's own numbers.
    fp16, bf16, params_dtype: what the model's parameters are. 16-bit parameters get fp32 master weights.
    clip_grad: scale all gradients so that their global 2-norm is at most this; 0 turns clipping off.
    grad_norm_skip_threshold: skip a step whose global norm is above this.
    log_num_zeros_in_grad: count the zeros among all gradients.
    use_distributed_optimizer: None follows the wrapped model; a value must agree with it.
    """

    optimizer: str = "adam"
    lr: float | None = None
    min_lr: float | None = None
    weight_decay: float = 0.01
    decoupled_weight_decay: bool = True

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9

    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32

    clip_grad: float = 1.0
    grad_norm_skip_threshold: float = math.inf
    log_num_zeros_in_grad: bool = False
    use_distributed_optimizer: bool | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in ALGORITHMS:
            raise ValueError(f"optimizer {self.optimizer!r} is not one of {', '.join(ALGORITHMS)}")
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both True; parameters have one dtype, set one of the two")
        if self.fp16:
            raise ValueError("fp16=True needs loss scaling, which is not built yet; use bf16=True, which needs none")
        for name in ("weight_decay", "clip_grad", "sgd_momentum", "adam_eps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        for name in ("lr", "min_lr"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must not be negative")
        if self.grad_norm_skip_threshold <= 0:
            raise ValueError(f"grad_norm_skip_threshold is {self.grad_norm_skip_threshold}; it must be above 0")

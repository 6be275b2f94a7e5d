"""The inner optimizer: the torch optimizer that does the arithmetic on master weights."""

from __future__ import annotations

from typing import Any

import torch

from core.optimizer.optimizer_config import OptimizerConfig


def inner_optimizer(config: OptimizerConfig, torch_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The torch optimizer of `config.optimizer`: fused where torch has a fused kernel for the device.

    torch_groups: param groups with their master weights; every group's own lr and weight decay are in it.
    """
    if config.optimizer not in ("adam", "sgd"):
        raise ValueError(f"optimizer {config.optimizer!r} is not built yet; use 'adam' or 'sgd'")
    make: Any
    if config.optimizer == "sgd":
        options: dict[str, Any] = {"momentum": config.sgd_momentum}
        make = torch.optim.SGD
    else:
        options = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
        make = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    lr = config.lr if config.lr is not None else 0.0
    try:
        return make(torch_groups, lr=lr, fused=True, **options)
    except RuntimeError:
        return make(torch_groups, lr=lr, foreach=True, **options)

"""GeminiDDP and GeminiOptimizer: GeminiPlugin for loops without a Booster, by the names before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from core.booster.plugin import GeminiPlugin
from core.booster.plugin.low_level_zero_optimizer import LowLevelZeroOptimizer
from core.compat.colossalai.low_level_zero import PRECISIONS
from core.interface import ModelWrapper


class GeminiDDP(ModelWrapper):
    """A model that GeminiOptimizer will shard. options: those of GeminiPlugin that are not the optimizer's.

        model = GeminiDDP(model, mixed_precision=torch.bfloat16, min_chunk_size_m=1)
        optimizer = GeminiOptimizer(HybridAdam(model.parameters(), lr=1e-3), model, max_norm=1.0)
        optimizer.backward(loss_of(model(batch))); optimizer.step(); optimizer.zero_grad()

    Raises ValueError for a dtype that is not fp16, bf16 or fp32, and GeminiPlugin's errors for its options.
    """

    def __init__(self, module: nn.Module, *, mixed_precision: torch.dtype = torch.float16, **options: Any) -> None:
        if mixed_precision not in PRECISIONS:
            raise ValueError(f"mixed_precision is {mixed_precision}; expected one of {list(map(str, PRECISIONS))}")
        super().__init__(module)
        self.options = {"precision": PRECISIONS[mixed_precision], **options}
        GeminiPlugin(**self.options)  # refuses what cannot work, here and not at the optimizer

    def unwrap(self) -> nn.Module:
        """The user's own module."""
        return self.module.unwrap() if isinstance(self.module, ModelWrapper) else self.module


class GeminiOptimizer(LowLevelZeroOptimizer):
    """Shards `module`, and steps `optim`, a torch optimizer of its parameters. Collective over the world.

    options: GeminiPlugin's initial_scale .. max_scale, max_norm, norm_type, gpu_margin_mem_ratio and verbose.
    """

    def __init__(self, optim: torch.optim.Optimizer, module: GeminiDDP, **options: Any) -> None:
        if not isinstance(module, GeminiDDP) or isinstance(module.module, ModelWrapper):
            raise TypeError("GeminiOptimizer takes a GeminiDDP that no other optimizer has sharded; make it anew")
        plugin = GeminiPlugin(**{"initial_scale": 2**32, **module.options, **options})
        plain = module.module
        module.module, made, *_ = plugin.configure(plain, optim)
        super().__init__(made.optim, made.engine, made.model, made.max_norm, verbose=plugin.verbose)
        self.name_parameters(plain)

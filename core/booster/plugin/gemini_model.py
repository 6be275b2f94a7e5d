"""GeminiModel: a model as GeminiPlugin returns it, whose parameters are whole only while they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as tree

from core.booster.plugin.low_level_zero_model import LowLevelZeroModel
from core.distributed import DistributedDataParallel

if TYPE_CHECKING:
    from core.distributed import MemStats
    from core.optimizer.adopted_optimizer import AdoptedOptimizer


class GeminiModel(LowLevelZeroModel):
    """outputs_fp32: True if floating outputs of the forward become fp32, wherever they are in its result."""

    def __init__(
        self,
        module: nn.Module,
        cast_to: torch.dtype | None = None,
        engine: AdoptedOptimizer | None = None,
        *,
        outputs_fp32: bool = False,
    ) -> None:
        super().__init__(module, cast_to, engine)
        self.outputs_fp32 = outputs_fp32

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        outputs = super().forward(*args, **kwargs)
        return tree.tree_map_only(torch.Tensor, _to_fp32, outputs) if self.outputs_fp32 else outputs

    @property
    def memstats(self) -> MemStats | None:
        """Statistics of the first step under placement_policy='auto', for `memstats` of the next run; else None."""
        return self.module.memstats if isinstance(self.module, DistributedDataParallel) else None


def _to_fp32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value

"""LowLevelZeroModel: the model that LowLevelZeroPlugin returns, with casts of inputs and access to the plain module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as tree

from core.booster.plugin.label_mean import LabelMeanModel
from core.distributed import DistributedDataParallel
from core.interface import AMPModelMixin
from core.interface.model import all_of

if TYPE_CHECKING:
    from core.distributed import MemStats
    from core.hugging_face.cut_model import CutModel
    from core.optimizer.adopted_optimizer import AdoptedOptimizer


class LowLevelZeroModel(LabelMeanModel, AMPModelMixin):
    """Boosted model of a ZeRO plugin.

    ``module`` is the engine's wrapper (the plain module without an optimizer), or a list of this rank's pipeline
    stages.

    Args:
        chunks: Wrappers of the parts: one, or one per pipeline stage of this rank.
        cast_to: Dtype that floating-point tensors in the arguments are cast to, at any depth. None leaves them
            unchanged.
        outputs_fp32: Cast floating-point tensors in the forward's result to fp32, at any depth.
        data_groups: Groups of data ranks over whose labels the loss is averaged.
    """

    def __init__(
        self,
        cut: CutModel,
        chunks: Sequence[nn.Module],
        cast_to: torch.dtype | None,
        engine: AdoptedOptimizer | None,
        *,
        outputs_fp32: bool,
        data_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        super().__init__(chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks))
        self.cut = cut
        self.chunks = list(chunks)
        self.cast_to = cast_to
        self.engine = engine
        self.outputs_fp32 = outputs_fp32
        self.data_groups = data_groups

    def parts(self) -> list[Any]:
        return list(self.cut.parts)

    def unwrap(self) -> nn.Module:
        part: nn.Module = self.cut.parts[0]
        return part

    @property
    def wrapped(self) -> list[DistributedDataParallel]:
        """Engine wrappers of this rank's chunks. Empty without an optimizer."""
        return [chunk for chunk in self.chunks if isinstance(chunk, DistributedDataParallel)]

    @property
    def memstats(self) -> MemStats | None:
        """Statistics of the first step under GeminiPlugin's placement_policy='auto', for the next run, or ``None``."""
        return next((chunk.memstats for chunk in self.wrapped), None)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All-gather sharded parameters on all ranks within a block, to evaluate, read or write them. Collective."""
        with all_of(chunk.gathered() for chunk in self.wrapped):
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Allow full values to be copied into parameters within a block. All ranks must enter and leave it together."""
        with all_of(chunk.engine.params.loading() for chunk in self.wrapped):
            yield

    @property
    def takes_mean_over_labels(self) -> bool:
        """True if there is an optimizer. Without one, ranks evaluate their own batches."""
        return self.engine is not None

    def run_module(self, *args: Any, **kwargs: Any) -> Any:
        if self.cast_to is not None:
            args, kwargs = tree.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        outputs = self.module(*args, **kwargs)
        return tree.tree_map_only(torch.Tensor, _to_fp32, outputs) if self.outputs_fp32 else outputs

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call a transformers model's own ``generate``. Sharded parameters are gathered on each rank during the
        call.
        """
        if self.cast_to is not None:
            args, kwargs = tree.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        with self.gathered():
            return super().generate(*args, **kwargs)

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.cast_to) if value.is_floating_point() else value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate this rank's gradients within a block without reducing them."""
        with all_of(chunk.no_sync() for chunk in self.wrapped):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, as the optimizer's ``zero_grad`` does. Collective if a reduction has begun."""
        for chunk in self.chunks:
            chunk.zero_grad(set_to_none)

    def update_master_params(self) -> None:
        """Copy parameters that were written from outside to the master weights."""
        if self.engine is not None:
            self.engine.reload_model_params()


def _to_fp32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value

"""GeminiCheckpointIO: the files of the other plugins, of parameters that no rank has whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from core.booster.checkpoint_io.low_level_zero_checkpoint_io import LowLevelZeroCheckpointIO
from core.distributed import DistributedDataParallel


class GeminiCheckpointIO(LowLevelZeroCheckpointIO):
    """A save gathers one chunk at a time. A load has the tensors of a file, and each rank keeps its part of them."""

    def values_of(self, model: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, made while the tensor's chunk is gathered. Collective."""
        wrapped = model.module
        if not isinstance(wrapped, DistributedDataParallel):
            return tensor.detach()
        with wrapped.reading():
            return tensor.detach().cpu().clone()

    def _load(
        self, model: nn.Module, readers: Iterable[Callable[[], Any]], names: set[str] | None, strict: bool
    ) -> None:
        wrapped = getattr(model, "module", None)
        with wrapped.engine.params.loading() if isinstance(wrapped, DistributedDataParallel) else nullcontext():
            super()._load(model, readers, names, strict)

"""GeminiCheckpointIO: the files of the other plugins, of parameters that no rank has whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from core.booster.checkpoint_io.low_level_zero_checkpoint_io import LowLevelZeroCheckpointIO
from core.distributed import DistributedDataParallel
from core.interface import AMPModelMixin


class GeminiCheckpointIO(LowLevelZeroCheckpointIO):
    """A save gathers one chunk at a time. A load has all parameters whole until it has ended."""

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
        if not isinstance(wrapped, DistributedDataParallel):
            super()._load(model, readers, names, strict)
            return
        error: Exception | None = None
        with wrapped.gathered():  # all ranks leave it together, also where one cannot read
            try:
                super()._load(model, readers, names, strict)
            except Exception as caught:
                error = caught
        if error is not None:
            raise error
        if isinstance(model, AMPModelMixin):
            model.update_master_params()

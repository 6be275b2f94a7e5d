"""ZeROGradientHandler: leaves the reduction to an optimizer that knows whose gradient is whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from core.distributed.distributed_data_parallel import DistributedDataParallel
from core.distributed.finalize_model_grads import finalize_model_grads
from core.gradient_handler.base import BaseGradientHandler
from core.gradient_handler.registry import GRADIENT_HANDLER


class GradSyncUnsupported(TypeError):
    """The optimizer has no gradients of its own to reduce."""


@runtime_checkable
class SupportsGradSync(Protocol):
    """An optimizer that reduces the gradients it will use."""

    def sync_grad(self) -> None:
        """Reduce all gradients of the step, so that `step` may follow. Collective."""


@GRADIENT_HANDLER.register_module
class ZeROGradientHandler(BaseGradientHandler):
    """Calls `optimizer.sync_grad()`, which the optimizer of LowLevelZeroPlugin has too.

    An optimizer of `get_megatron_optimizer` is finalized through its model chunks.

    Raises GradSyncUnsupported, when it is made, for an optimizer that can do neither.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__(model, optimizer)
        if not isinstance(optimizer, SupportsGradSync) and not self._chunks():
            raise GradSyncUnsupported(
                f"ZeROGradientHandler needs an optimizer with sync_grad() or one made by get_megatron_optimizer; "
                f"{type(optimizer).__name__} is neither. For a replicated optimizer use DataParallelGradientHandler"
            )

    def handle_gradient(self) -> None:
        """Reduce the gradients of the step, once: a second call before the next backward does nothing. Collective."""
        if isinstance(self._optimizer, SupportsGradSync):
            self._optimizer.sync_grad()
            return
        chunks = self._chunks()
        if any(chunk.reducer.open for chunk in chunks):
            finalize_model_grads(chunks)

    def _chunks(self) -> Sequence[DistributedDataParallel]:
        chunks = getattr(self._optimizer, "model_chunks", None) or ()
        return [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]

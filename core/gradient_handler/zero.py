"""ZeROGradientHandler: delegates the reduction to an optimizer that knows which rank needs which gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from core.distributed.distributed_data_parallel import DistributedDataParallel
from core.distributed.finalize_model_grads import finalize_model_grads
from core.gradient_handler.base import BaseGradientHandler
from core.gradient_handler.registry import GRADIENT_HANDLER


class GradSyncUnsupported(TypeError):
    """Error raised for an optimizer that cannot reduce gradients."""


@runtime_checkable
class SupportsGradSync(Protocol):
    """Protocol of an optimizer that reduces its own gradients."""

    def sync_grad(self) -> None:
        """Reduce all gradients before ``step``. Collective."""


@GRADIENT_HANDLER.register_module
class ZeROGradientHandler(BaseGradientHandler):
    """Calls ``optimizer.sync_grad()``, which the optimizer of LowLevelZeroPlugin also has.

    For an optimizer from ``get_megatron_optimizer`` it finalizes the model chunks instead.

    Args:
        model (Module): Model with the gradients.
        optimizer (Optimizer): Optimizer that reduces its gradients.

    Raises:
        GradSyncUnsupported: If the optimizer supports neither.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__(model, optimizer)
        if not isinstance(optimizer, SupportsGradSync) and not self._chunks():
            raise GradSyncUnsupported(
                f"ZeROGradientHandler needs an optimizer with sync_grad() or one made by get_megatron_optimizer; "
                f"{type(optimizer).__name__} is neither. For a replicated optimizer use DataParallelGradientHandler"
            )

    def handle_gradient(self) -> None:
        """Reduce the gradients of the step. Collective. A second call before the next backward is a no-op."""
        if isinstance(self._optimizer, SupportsGradSync):
            self._optimizer.sync_grad()
            return
        chunks = self._chunks()
        if any(chunk.reducer.open for chunk in chunks):
            finalize_model_grads(chunks)

    def _chunks(self) -> Sequence[DistributedDataParallel]:
        chunks = getattr(self._optimizer, "model_chunks", None) or ()
        return [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]

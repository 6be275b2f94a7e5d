"""LowLevelZeroModel: a model as LowLevelZeroPlugin returns it; casts inputs, and keeps the plain module at hand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as tree

from core.distributed import DistributedDataParallel
from core.interface import AMPModelMixin, ModelWrapper

if TYPE_CHECKING:
    from core.optimizer.adopted_optimizer import AdoptedOptimizer


class LowLevelZeroModel(ModelWrapper, AMPModelMixin):
    """`module` is the engine's wrapper, or the plain module where there is no optimizer.

    cast_to: what floating inputs become, wherever they lie in arguments; None leaves them.
    """

    def __init__(
        self, module: nn.Module, cast_to: torch.dtype | None = None, engine: AdoptedOptimizer | None = None
    ) -> None:
        super().__init__(module)
        self.cast_to = cast_to
        self.engine = engine

    def unwrap(self) -> nn.Module:
        """The user's own module."""
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if self.cast_to is not None:
            args, kwargs = tree.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        return self.module(*args, **kwargs)

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.cast_to) if value.is_floating_point() else value

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward adds to this rank's gradients without reducing them."""
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()

    def update_master_params(self) -> None:
        """Take master weights from parameters that were written from outside."""
        if self.engine is not None:
            self.engine.reload_model_params()

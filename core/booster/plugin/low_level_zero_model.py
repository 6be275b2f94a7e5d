"""LowLevelZeroModel: a model as LowLevelZeroPlugin returns it; casts inputs, and keeps the plain module at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as tree

from core.distributed import DistributedDataParallel
from core.interface import AMPModelMixin, ModelWrapper

if TYPE_CHECKING:
    from core.optimizer.adopted_optimizer import AdoptedOptimizer
    from core.pipeline_parallel import PipelineLayout


class LowLevelZeroModel(ModelWrapper, AMPModelMixin):
    """`module` is the engine's wrapper, or the plain module where there is no optimizer.

    cast_to: what floating inputs become, wherever they lie in arguments; None leaves them.
    """

    def __init__(
        self, module: nn.Module, cast_to: torch.dtype | None = None, engine: AdoptedOptimizer | None = None
    ) -> None:
        super().__init__(module)
        self.chunks = [module]  # of this rank: one, or the stages of a pipeline
        self.layout: PipelineLayout | None = None  # of the stages
        self.cast_to = cast_to
        self.engine = engine

    def parts(self) -> list[nn.Module]:
        """The plain modules of this rank's chunks."""
        return [part.module if isinstance(part, DistributedDataParallel) else part for part in self.chunks]

    def unwrap(self) -> nn.Module:
        """The user's own module; this rank's first stage of it, where there are several."""
        return self.parts()[0]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have whole parameters where they are sharded, on all ranks: to evaluate, read or write them. Collective."""
        with ExitStack() as stack:
            for chunk in self.chunks:
                if isinstance(chunk, DistributedDataParallel):
                    stack.enter_context(chunk.gathered())
            yield

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if self.cast_to is not None:
            args, kwargs = tree.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call a transformers model's own `generate`. Sharded parameters are whole during it, on each rank."""
        if self.cast_to is not None:
            args, kwargs = tree.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        with self.gathered():
            return super().generate(*args, **kwargs)

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.cast_to) if value.is_floating_point() else value

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward adds to this rank's gradients without reducing them."""
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, as the optimizer's `zero_grad` does. Collective where a reduction has begun."""
        for chunk in self.chunks:
            chunk.zero_grad(set_to_none)

    def update_master_params(self) -> None:
        """Take master weights from parameters that were written from outside."""
        if self.engine is not None:
            self.engine.reload_model_params()

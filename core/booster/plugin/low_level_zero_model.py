"""LowLevelZeroModel: the model that LowLevelZeroPlugin returns, with casts of inputs and access to the plain module."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as tree

from core.booster.plugin.hybrid_parallel_loss import NUM_ITEMS, given_items, loss_of_whole_batch
from core.distributed import DistributedDataParallel
from core.groups.process_groups import ProcessGroups
from core.hugging_face.label_counts import count_labels
from core.interface import AMPModelMixin, ModelWrapper
from core.interface.model import all_of

if TYPE_CHECKING:
    from core.distributed import MemStats
    from core.hugging_face.cut_model import CutModel
    from core.optimizer.adopted_optimizer import AdoptedOptimizer


class LowLevelZeroModel(ModelWrapper, AMPModelMixin):
    """Boosted model of a ZeRO plugin.

    `module` is the engine's wrapper (the plain module without an optimizer), or a list of this rank's pipeline stages.

    Args:
        cut: This rank's parts of the model.
        chunks: Wrappers of the parts: one, or one per pipeline stage of this rank.
        cast_to: Dtype that floating-point tensors in the arguments are cast to, at any depth; None to leave them.
        engine: The sharded optimizer, or None.
        outputs_fp32: True to cast floating-point tensors in the forward's result to fp32, at any depth.
        loss_groups: Groups whose 'dp' ranks share one mean over labels: the loss that a transformers model computes
            from `labels` is then the mean over all their labels. This needs a small collective, and applies if there is
            an optimizer and gradients are recorded. None for the rank's own loss.
    """

    losses_are_local = False  # True: with num_items_in_batch the loss is over this rank's rows, as under torch's DDP

    def __init__(
        self,
        cut: CutModel,
        chunks: Sequence[nn.Module],
        cast_to: torch.dtype | None,
        engine: AdoptedOptimizer | None,
        *,
        outputs_fp32: bool,
        loss_groups: ProcessGroups | None = None,
    ) -> None:
        super().__init__(chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks))
        self.cut = cut
        self.chunks = list(chunks)
        self.cast_to = cast_to
        self.engine = engine
        self.outputs_fp32 = outputs_fp32
        self.loss_groups = loss_groups

    def parts(self) -> list[Any]:
        """Return the plain modules of this rank's chunks."""
        return list(self.cut.parts)

    def unwrap(self) -> nn.Module:
        """Return the user's own module, or this rank's first stage of it."""
        part: nn.Module = self.cut.parts[0]
        return part

    @property
    def wrapped(self) -> list[DistributedDataParallel]:
        """The engine's wrappers of this rank's chunks; empty without an optimizer."""
        return [chunk for chunk in self.chunks if isinstance(chunk, DistributedDataParallel)]

    @property
    def memstats(self) -> MemStats | None:
        """Statistics of the first step under GeminiPlugin's placement_policy='auto', for the next run; or None."""
        return next((chunk.memstats for chunk in self.wrapped), None)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather sharded parameters on all ranks within a block, to evaluate, read or write them. Collective."""
        with all_of(chunk.gathered() for chunk in self.wrapped):
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Allow full values to be copied into parameters within a block. All ranks must enter and leave it together."""
        with all_of(chunk.engine.params.loading() for chunk in self.wrapped):
            yield

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, with inputs and outputs cast, and with the loss over all data ranks' labels.

        Args:
            *args: Arguments of the module.
            **kwargs: Arguments of the module.
        """
        count = total = None
        is_local = self.losses_are_local and kwargs.get(NUM_ITEMS) is not None
        if self.takes_mean_over_labels and torch.is_grad_enabled() and not is_local:
            names = self._positional if args else ()
            count = count_labels(self.unwrap(), {**dict(zip(names, args, strict=False)), **kwargs})
        if count is not None:
            total = given_items(kwargs, count.device)
            kwargs.pop(NUM_ITEMS, None)
        if self.cast_to is not None:
            args, kwargs = tree.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        outputs = self.module(*args, **kwargs)
        if self.outputs_fp32:
            outputs = tree.tree_map_only(torch.Tensor, _to_fp32, outputs)
        return outputs if count is None else self._with_loss_of_batch(outputs, count, total)

    @property
    def takes_mean_over_labels(self) -> bool:
        """True if the loss that a forward computes from labels is the mean over all data ranks' labels."""
        return self.loss_groups is not None and self.engine is not None

    @cached_property
    def _positional(self) -> list[str]:
        """Names of the positional arguments of the model's forward."""
        return list(inspect.signature(type(self.unwrap()).forward).parameters)[1:]

    def _with_loss_of_batch(self, output: Any, count: torch.Tensor, total: torch.Tensor | None) -> Any:
        """Replace the loss of this rank's rows in a model's output, if there is one. Collective over 'dp'."""
        assert self.loss_groups is not None
        if isinstance(output, tuple):
            loss = loss_of_whole_batch(output[0], count, total, self.loss_groups) if output[0].dim() == 0 else output[0]
            return (loss, *output[1:])
        if output.get("loss") is None:
            return output
        output["loss"] = loss_of_whole_batch(output["loss"], count, total, self.loss_groups)
        return output

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call a transformers model's own `generate`. Sharded parameters are gathered on each rank during it."""
        if self.cast_to is not None:
            args, kwargs = tree.tree_map_only(torch.Tensor, self._cast, (args, kwargs))
        with self.gathered():
            return super().generate(*args, **kwargs)

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.cast_to) if value.is_floating_point() else value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward add to this rank's gradients without reducing them, within a block."""
        with all_of(chunk.no_sync() for chunk in self.wrapped):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, as the optimizer's `zero_grad` does. Collective if a reduction has begun."""
        for chunk in self.chunks:
            chunk.zero_grad(set_to_none)

    def update_master_params(self) -> None:
        """Copy parameters that were written from outside to the master weights."""
        if self.engine is not None:
            self.engine.reload_model_params()


def _to_fp32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value

"""LowLevelZeroCheckpointIO: checkpoints of a sharded optimizer, gathered one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from core.booster.checkpoint_io.general_checkpoint_io import States
from core.booster.checkpoint_io.torch_ddp_checkpoint_io import TorchDDPCheckpointIO
from core.distributed import DistributedDataParallel

if TYPE_CHECKING:
    from core.booster.plugin.low_level_zero_optimizer import LowLevelZeroOptimizer
    from core.hugging_face.cut_model import CutModel


class LowLevelZeroCheckpointIO(TorchDDPCheckpointIO):
    """Checkpoints in the other plugins' format, with the fp32 masters of 16-bit training in the optimizer's file.

    Load the model too, before or after its optimizer: a master that does not round to the weight is replaced by it.
    """

    def model_tensors(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield each tensor, gathered if parameters are sharded. Collective."""
        _refuse_split_experts(getattr(model, "module", None), getattr(model, "cut", None))
        yield from super().model_tensors(model)

    def full_value(self, model: nn.Module, value: Any) -> Any:
        """Return a tensor, gathered if parameters are sharded. Collective in that case."""
        return values_of(getattr(model, "module", None), value) if isinstance(value, torch.Tensor) else value

    def _load(
        self, model: nn.Module, readers: Iterable[Callable[[], Any]], names: set[str] | None, strict: bool
    ) -> None:
        with getattr(model, "loading", nullcontext)():  # a wrong argument lacks the method, and is rejected inside
            super()._load(model, readers, names, strict)

    def optimizer_groups(self, optimizer: LowLevelZeroOptimizer) -> list[dict[str, Any]]:
        """Return the user's groups, with the full model's numbers and names."""
        return optimizer.packed_groups()

    def optimizer_states(self, optimizer: LowLevelZeroOptimizer) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each parameter's state, gathered. Collective."""
        _refuse_split_experts(optimizer.model, optimizer.cut)
        yield from optimizer.full_states()

    def place_state(self, optimizer: LowLevelZeroOptimizer, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a parameter's state."""
        return optimizer.place(number, state)

    def load_optimizer_states(
        self, optimizer: LowLevelZeroOptimizer, groups: list[dict[str, Any]], states: States
    ) -> None:
        """Load groups, and parts from ``place_state``."""
        _refuse_split_experts(optimizer.model, optimizer.cut)
        optimizer.load_states(groups, states)


def values_of(wrapped: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a wrapped model's tensor, copied if parameters are sharded. Collective in that case."""
    if not (isinstance(wrapped, DistributedDataParallel) and wrapped.ddp_config.shards_parameters):
        return tensor.detach()
    with wrapped.reading():
        return tensor.detach().clone()


def _refuse_split_experts(wrapped: Any, cut: CutModel | None) -> None:
    """Raise ValueError, before any collective, if experts are on several ranks without a cut that can gather them.

    Rank 0 would otherwise write its own experts for all ranks.
    """
    if isinstance(wrapped, DistributedDataParallel) and (cut is None or not cut.splits):
        size = wrapped.groups.size("ep")
        if wrapped.expert_parallel_buffers and size > 1:
            raise ValueError(
                f"experts are spread over {size} ranks, and these files know each name once; save and load with "
                "core.checkpoint.save_checkpoint and load_checkpoint, which know which experts a rank holds"
            )

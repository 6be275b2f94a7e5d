"""LowLevelZeroCheckpointIO: models are whole on every rank; optimizer state is gathered, one parameter at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from core.booster.checkpoint_io.general_checkpoint_io import States, plain
from core.booster.checkpoint_io.torch_ddp_checkpoint_io import TorchDDPCheckpointIO
from core.distributed import DistributedDataParallel

if TYPE_CHECKING:
    from core.booster.plugin.low_level_zero_optimizer import LowLevelZeroOptimizer
    from core.hugging_face.cut_model import CutModel


class LowLevelZeroCheckpointIO(TorchDDPCheckpointIO):
    """Files of the other plugins' form, with the fp32 masters of 16-bit training in the optimizer's.

    Load the model too, before or after its optimizer: a master that does not round to the weight gives way to it.
    """

    def model_tensors(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        """Each tensor, in memory of its own where it is tied, so that files show that it is one."""
        wrapped = getattr(model, "module", None)
        _refuse_split_experts(wrapped, getattr(model, "cut", None))
        tensors = plain(model).state_dict(keep_vars=True)
        uses = Counter(id(value) for value in tensors.values())
        kept: dict[int, torch.Tensor] = {}
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor) and uses[id(value)] > 1:
                if id(value) not in kept:
                    kept[id(value)] = values_of(wrapped, value).cpu().clone()
                yield name, kept[id(value)]
            else:
                yield name, values_of(wrapped, value) if isinstance(value, torch.Tensor) else value

    def _load(
        self, model: nn.Module, readers: Iterable[Callable[[], Any]], names: set[str] | None, strict: bool
    ) -> None:
        with getattr(model, "loading", nullcontext)():  # not of a wrong argument, which is refused inside
            super()._load(model, readers, names, strict)

    def optimizer_groups(self, optimizer: LowLevelZeroOptimizer) -> list[dict[str, Any]]:
        """The user's groups, with the whole model's numbers and names."""
        return optimizer.packed_groups()

    def optimizer_states(self, optimizer: LowLevelZeroOptimizer) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each parameter's state, gathered."""
        _refuse_split_experts(optimizer.model, optimizer.cut)
        yield from optimizer.whole_states()

    def place_state(self, optimizer: LowLevelZeroOptimizer, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a parameter's state."""
        return optimizer.place(number, state)

    def load_optimizer_states(
        self, optimizer: LowLevelZeroOptimizer, groups: list[dict[str, Any]], states: States
    ) -> None:
        """Take over groups, and parts that `place_state` has given."""
        _refuse_split_experts(optimizer.model, optimizer.cut)
        optimizer.load_states(groups, states)


def values_of(wrapped: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of a wrapped model; a copy where parameters are sharded. Collective then."""
    if not (isinstance(wrapped, DistributedDataParallel) and wrapped.ddp_config.shards_parameters):
        return tensor.detach()
    with wrapped.reading():
        return tensor.detach().clone()


def _refuse_split_experts(wrapped: Any, cut: CutModel | None) -> None:
    """Before any collective: rank 0 has its own experts only, and would write them for all. A cut has put them so."""
    if isinstance(wrapped, DistributedDataParallel) and (cut is None or not cut.splits):
        size = wrapped.groups.size("ep")
        if wrapped.expert_parallel_buffers and size > 1:
            raise ValueError(
                f"experts are spread over {size} ranks, and these files know each name once; save and load with "
                "core.checkpoint.save_checkpoint and load_checkpoint, which know which experts a rank holds"
            )

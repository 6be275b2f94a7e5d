"""HybridParallelCheckpointIO: files hold the whole model, whatever the layout; each rank takes its slices of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from core.booster.checkpoint_io.checkpoint_io_base import expect_model
from core.booster.checkpoint_io.general_checkpoint_io import States, check_names, check_shapes
from core.booster.checkpoint_io.low_level_zero_checkpoint_io import LowLevelZeroCheckpointIO

if TYPE_CHECKING:
    from core.booster.plugin.hybrid_parallel_model import HybridParallelModel
    from core.booster.plugin.hybrid_parallel_optimizer import HybridParallelOptimizer


class HybridParallelCheckpointIO(LowLevelZeroCheckpointIO):
    """Tensors are put together one at a time, over tensor-parallel ranks and then over stages; rank 0 writes.

    A file that was written in one layout loads in any other, in the other plugins, and in transformers.
    """

    def whole_module(self, model: HybridParallelModel) -> nn.Module:
        """The whole model without memory."""
        return model.whole.shell

    def model_tensors(self, model: HybridParallelModel) -> Iterator[tuple[str, Any]]:
        """Each tensor of the whole model; a tied one is one tensor under all of its names."""
        from core.booster.plugin.hybrid_parallel_optimizer import of_all_stages
        from core.hugging_face.slices import whole_of

        groups = model.groups
        seen: set[str] = set()

        def mine() -> Iterator[tuple[str, torch.Tensor]]:
            for part in model.parts():
                for name, value in part.state_dict(keep_vars=True).items():
                    if name not in seen:
                        seen.update(model.whole.tied.get(name, (name,)))
                        yield name, whole_of(value.detach(), model.whole.splits.get(name), groups).cpu()

        given: set[str] = set()
        for name, value in of_all_stages(mine(), groups.pp):
            for same in model.whole.tied.get(name, (name,)) if name not in given else ():
                given.add(same)
                yield same, value

    def _load(self, model: Any, readers: Iterable[Callable[[], Any]], names: set[str] | None, strict: bool) -> None:
        from core.hugging_face.slices import slice_of

        expect_model(model, "load_model")
        whole = model.whole.shell.state_dict(keep_vars=True)
        if names is not None:
            check_names(whole, names, strict)
        for read in readers:
            content: Mapping[str, Any] = read()
            if names is None:
                check_names(whole, set(content), strict)
            check_shapes(whole, content)
            with torch.no_grad():
                for part in model.parts():
                    for name, own in part.state_dict(keep_vars=True).items():
                        found = next((content[n] for n in model.whole.tied.get(name, (name,)) if n in content), None)
                        if found is not None:
                            own.copy_(slice_of(found, model.whole.splits.get(name), model.groups))
        model.update_master_params()

    def optimizer_groups(self, optimizer: HybridParallelOptimizer) -> list[dict[str, Any]]:  # type: ignore[override]
        """The user's groups, with the whole model's numbers and names."""
        return optimizer.packed_groups()

    def optimizer_states(  # type: ignore[override]
        self, optimizer: HybridParallelOptimizer
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each parameter's state, gathered."""
        yield from optimizer.whole_states()

    def place_state(  # type: ignore[override]
        self, optimizer: HybridParallelOptimizer, number: int, state: dict[str, Any]
    ) -> dict[str, Any]:
        """This rank's part of a parameter's state."""
        return optimizer.place(number, state)

    def load_optimizer_states(  # type: ignore[override]
        self, optimizer: HybridParallelOptimizer, groups: list[dict[str, Any]], states: States
    ) -> None:
        """Take over groups, and parts that `place_state` has given."""
        optimizer.load_states(groups, states)

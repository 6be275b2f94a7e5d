"""HybridParallelOptimizer: the sharded optimizer of a model that is cut over tensor and pipeline parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from core.booster.checkpoint_io.general_checkpoint_io import match_groups
from core.booster.checkpoint_io.sharded_states import (
    load_parts,
    of_all_stages,
    own_part,
    packed_groups,
    update_groups,
    whole_states,
)
from core.booster.plugin.low_level_zero_optimizer import LowLevelZeroOptimizer
from core.distributed import DistributedDataParallel
from core.hugging_face.cut_model import CutModel
from core.optimizer.adopted_optimizer import AdoptedOptimizer
from core.optimizer.optimizer_state import plain_numbers


class HybridParallelOptimizer(LowLevelZeroOptimizer):
    """Its parameters are numbered and named as in the whole model, so that its state fits any layout.

    cut: the model. whole_groups: for each group of the user's optimizer the names of its parameters in the whole model.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        engine: AdoptedOptimizer,
        chunks: Sequence[DistributedDataParallel],
        max_norm: float,
        cut: CutModel,
        whole_groups: Sequence[Sequence[str]],
        *,
        verbose: bool = False,
    ) -> None:
        super().__init__(optim, engine, chunks, max_norm, verbose=verbose)
        self.cut = cut
        self.whole_groups = [list(names) for names in whole_groups]
        name_of = {id(param): name for name, param in cut.parameters.items()}
        mine = [name_of[id(param)] for param in itertools.chain.from_iterable(engine.user_params)]
        number_of = {name: number for number, name in enumerate(itertools.chain.from_iterable(self.whole_groups))}
        self.name_of_number = {number: name for name, number in number_of.items()}
        self.numbers = [number_of[name] for name in mine]  # in the whole model, of each parameter here
        self.place_here = {number: place for place, number in enumerate(self.numbers)}

    @property
    def _together(self) -> list[dist.ProcessGroup]:
        groups = self.model.groups
        return [groups.control("dp_cp"), *(groups.require(name) for name in ("tp", "pp") if groups.size(name) > 1)]

    # -- state, in the form of the whole model ----------------------------------------------------------------------

    def packed_groups(self) -> list[dict[str, Any]]:
        """The groups with numbers and names of all of the whole model's parameters."""
        number = itertools.count()
        groups = packed_groups(self.engine, {})
        for group, names in zip(groups, self.whole_groups, strict=True):
            group["params"] = [next(number) for _ in names]
            group["param_names"] = list(names)
        return groups

    def whole_states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, state) of each parameter of the whole model, in host memory. Collective: every rank exhausts it."""
        joined = (
            (self.numbers[place], self._joined(self.numbers[place], state))
            for place, state in whole_states(self.engine)
        )
        yield from of_all_stages(joined, self.cut.groups.pp)

    def _joined(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """The state of a whole parameter from those of its slices. Collective over the groups that it is cut over."""
        name = self.name_of_number[number]
        return {
            key: self.cut.whole_of(name, value).cpu() if isinstance(value, torch.Tensor) and value.dim() > 0 else value
            for key, value in state.items()
        }

    def place(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a whole parameter's state; nothing of a parameter that lies elsewhere."""
        place = self.place_here.get(number)
        if place is None:
            return {}
        name = self.name_of_number[number]
        sliced = {
            key: self.cut.slice_of(name, value) if isinstance(value, torch.Tensor) and value.dim() > 0 else value
            for key, value in state.items()
        }
        return own_part(self.engine, place, sliced)

    def load_states(self, groups: Sequence[Mapping[str, Any]], states: Mapping[int, dict[str, Any]]) -> None:
        """Take over parts that `place` has given."""
        load_parts(self.engine, {self.place_here[n]: state for n, state in states.items() if n in self.place_here})
        update_groups(self.engine, groups)

    def inner_state(self) -> dict[str, Any]:
        """The whole model's state in torch's format, on every rank, in host memory. Collective."""
        return {"state": dict(self.whole_states()), "param_groups": plain_numbers(self.packed_groups())}

    def load_inner_state(self, state_dict: dict[str, Any]) -> None:
        """Continue where `inner_state` of any layout, or a torch optimizer's over the whole model, was called."""
        numbers = match_groups(state_dict["param_groups"], self.packed_groups())
        found = {numbers[int(number)]: state for number, state in state_dict["state"].items()}
        self.load_states(state_dict["param_groups"], {number: self.place(number, s) for number, s in found.items()})

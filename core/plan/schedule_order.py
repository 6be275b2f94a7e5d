"""In which order a rank works: forwards and backwards of its stages, as the schedule has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from core.pipeline_parallel.layout import PipelineLayout
from core.pipeline_parallel.schedules import build_schedule, find_schedule

Kind = Literal["F", "B", "I", "W"]  # forward, backward; where they are apart, input gradients and weight gradients


class Action(NamedTuple):
    """One thing that a rank does for one microbatch."""

    kind: Kind
    stage: int
    microbatch: int


@dataclass
class StandIn:
    """A stage as torch's schedules read it when they make their table."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int
    has_backward: bool = True
    submod: Any = None

    @property
    def is_first(self) -> bool:
        """True on the first stage."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """True on the last stage."""
        return self.stage_index == self.num_stages - 1


@lru_cache(maxsize=256)
def actions_of_ranks(schedule: str, layout: PipelineLayout, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """For each rank of the pipeline what it does, in order.

    GPipe and 1F1B are said here: torch runs them without a table. The others are torch's tables.
    """
    if layout.num_stages == 1:
        return (tuple(Action(kind, 0, n) for n in range(microbatches) for kind in _FORWARD_BACKWARD),)
    kind = find_schedule(schedule)
    if not kind.many_chunks:
        return tuple(
            tuple(_one_stage(stage, layout.pp if kind.name == "1F1B" else None, layout.pp, microbatches))
            for stage in range(layout.pp)
        )
    return tuple(tuple(_of_torch(kind, layout, rank, microbatches)) for rank in range(layout.pp))


_FORWARD_BACKWARD: tuple[Kind, Kind] = ("F", "B")


def _one_stage(stage: int, in_flight: int | None, stages: int, microbatches: int) -> list[Action]:
    """All forwards first (GPipe), or only as many as there are stages behind this one, itself included (1F1B)."""
    ahead = microbatches if in_flight is None else min(microbatches, stages - stage)
    actions = [Action("F", stage, n) for n in range(ahead)]
    for done in range(microbatches):
        actions.append(Action("B", stage, done))
        if ahead + done < microbatches:
            actions.append(Action("F", stage, ahead + done))
    return actions


def _of_torch(kind: Any, layout: PipelineLayout, rank: int, microbatches: int) -> Sequence[Action]:
    stages = [StandIn(stage, layout.num_stages, layout.pp, rank) for stage in layout.stages_of(rank)]
    order = build_schedule(kind, list(stages), microbatches).pipeline_order[rank]
    return [part for action in order if action is not None for part in _parts(action)]


def _parts(action: Any) -> Sequence[Action]:
    """An action of torch's table as ours; nothing for one that is not computation."""
    if action.sub_actions is not None:
        return [part for inner in action.sub_actions for part in _parts(inner)]
    kind: Any = str(action.computation_type.value)
    return [Action(kind, action.stage_index, action.microbatch_index)] if kind in ("F", "B", "I", "W") else []

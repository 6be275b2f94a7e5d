"""In which order a rank works: forwards and backwards of its stages, as the schedule has them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from core.pipeline_parallel.layout import PipelineLayout
from core.pipeline_parallel.schedules import Action, actions_in, build_schedule, find_schedule


@dataclass
class StageStandIn:
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

    GPipe and 1F1B are said here: torch runs them without a table. Interleaved1F1B is too, because torch takes seconds
    for a long pipeline. The others are torch's tables.
    """
    if layout.num_stages == 1:
        return (tuple(Action(kind, 0, n) for n in range(microbatches) for kind in _FORWARD_BACKWARD),)
    kind = find_schedule(schedule)
    if not kind.many_chunks:
        return tuple(
            tuple(_one_stage(stage, layout.pp if kind.name == "1F1B" else None, layout.pp, microbatches))
            for stage in range(layout.pp)
        )
    if kind.name == "Interleaved1F1B":
        return tuple(tuple(_interleaved(layout, rank, microbatches)) for rank in range(layout.pp))
    stages: list[Any] = [StageStandIn(stage, layout.num_stages, layout.pp, 0) for stage in layout.stages_of(0)]
    table = build_schedule(kind, stages, microbatches).pipeline_order
    return tuple(tuple(actions_in(table[rank])) for rank in range(layout.pp))


_FORWARD_BACKWARD: tuple[Literal["F"], Literal["B"]] = ("F", "B")


def _one_stage(stage: int, in_flight: int | None, stages: int, microbatches: int) -> list[Action]:
    """All forwards first (GPipe), or only as many as there are stages behind this one, itself included (1F1B)."""
    ahead = microbatches if in_flight is None else min(microbatches, stages - stage)
    actions = [Action("F", stage, n) for n in range(ahead)]
    for done in range(microbatches):
        actions.append(Action("B", stage, done))
        if ahead + done < microbatches:
            actions.append(Action("F", stage, ahead + done))
    return actions


def _interleaved(layout: PipelineLayout, rank: int, microbatches: int) -> list[Action]:
    """Rounds of about as many microbatches as ranks go through the chunks; then a forward and a backward in turns."""
    stages, total = layout.stages_of(rank), microbatches * layout.chunks
    a_round = microbatches // max(1, microbatches // layout.pp)
    ahead = min(total, (layout.chunks - 1) * a_round + 2 * (layout.pp - 1 - rank))
    done = {kind: dict.fromkeys(stages, 0) for kind in _FORWARD_BACKWARD}

    def action(kind: Literal["F", "B"], step: int) -> Action:
        place = step // a_round % layout.chunks
        stage = stages[place if kind == "F" else layout.chunks - 1 - place]
        done[kind][stage] += 1
        return Action(kind, stage, done[kind][stage] - 1)

    actions = [action("F", step) for step in range(ahead)]
    for step in range(total):
        if ahead + step < total:
            actions.append(action("F", ahead + step))
        actions.append(action("B", step))
    return actions

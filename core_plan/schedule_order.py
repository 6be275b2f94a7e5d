"""The order of a rank's work: forwards and backwards of its stages, as in the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from core.pipeline_parallel.layout import PipelineLayout
from core.pipeline_parallel.schedules import Action, actions_in, build_schedule, find_schedule


@dataclass
class StageStandIn:
    """Placeholder for a stage, with the attributes that torch's schedules read to build their table."""

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
    """Return the actions of each rank of the pipeline, in order.

    GPipe and 1F1B are implemented here, because torch runs them without a table. Interleaved1F1B is too, because torch
    takes seconds for a long pipeline. Other schedules use torch's tables.
    """
    if layout.num_stages == 1:
        return (tuple(Action(kind, 0, n) for n in range(microbatches) for kind in _FORWARD_BACKWARD),)
    kind = find_schedule(schedule)
    if kind.name in ("GPipe", "1F1B", "Interleaved1F1B"):
        return tuple(tuple(_in_turns(kind.name, layout, rank, microbatches)) for rank in range(layout.pp))
    stages: list[Any] = [StageStandIn(stage, layout.num_stages, layout.pp, 0) for stage in layout.stages_of(0)]
    table = build_schedule(kind, stages, microbatches).pipeline_order
    return tuple(tuple(actions_in(table[rank])) for rank in range(layout.pp))


_FORWARD_BACKWARD: tuple[Literal["F"], Literal["B"]] = ("F", "B")


def _in_turns(schedule: str, layout: PipelineLayout, rank: int, microbatches: int) -> list[Action]:
    """Return some forwards, followed by alternating forwards and backwards.

    The first forwards are all forwards (GPipe), or one for each later stage (1F1B). If a rank has several stages,
    rounds of about as many microbatches as ranks pass through them.
    """
    stages, total = layout.stages_of(rank), microbatches * layout.chunks
    a_round, behind = microbatches // max(1, microbatches // layout.pp), layout.pp - 1 - rank
    interleaved = (layout.chunks - 1) * a_round + 2 * behind
    ahead = min(total, {"GPipe": total, "1F1B": behind}.get(schedule, interleaved))
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

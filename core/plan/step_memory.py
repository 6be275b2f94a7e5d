"""Memory of activations along a step: the schedule's order of forwards and backwards over the figures of the parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core.pipeline_parallel.schedules import Arrivals, passed
from core.plan.schedule_order import Action
from core.plan.step_figures import PartFigures

ACTIVATIONS, WORKING, RECEIVED = "activations", "working memory of a layer", "received and sent activations"
WHOLE = "whole gradients of microbatches"
STEP_KINDS = (ACTIVATIONS, WORKING, WHOLE, RECEIVED)


class Highest(NamedTuple):
    """The most bytes while an action runs: its own, and whole gradients that wait for the last backward.

    parts: so many parts of the stage, the first ones, still hold what their forward has saved.
    """

    own: int
    waiting: int
    parts: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.own + self.waiting


class Saved(NamedTuple):
    """Tensors that one part of a stage has saved, by name: bytes of one microbatch, and number of microbatches."""

    part: str
    each: int
    copies: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.each * self.copies


@dataclass(frozen=True)
class StageFigures:
    """One stage, for one microbatch: bytes that its forward saves; the most while forward and backward run.

    saved_by: bytes that the first n parts save, for each n from 0. whole: bytes of whole gradients, which wait for the
    last microbatch, where a rank keeps only its shard; else 0. The first backward of a step makes them, and the last
    one gives them away: first, last.
    """

    saved: int
    saved_by: Sequence[int]
    forward: int
    backward: int
    whole: int
    first: Highest
    last: Highest

    @classmethod
    def of(cls, parts: Sequence[PartFigures], whole: int = 0) -> StageFigures:
        """Those of parts that run one after the other: earlier ones have saved, and later ones have freed."""
        forward = elements = 0
        saved_by = [0]
        own, waiting = [], []  # of each part: bytes while its backward runs; elements up to its last parameter
        for part in parts:
            before = saved_by[-1]
            forward = max(forward, before + part.forward)
            own.append(before + max(part.saved, part.backward))
            saved_by.append(before + part.saved)
            elements += sum(numel for numel, _ in part.params)
            waiting.append(elements)
        saved = saved_by[-1]
        left = [whole * reached // max(1, elements) for reached in waiting]
        # Where less is held than all parts have saved, later ones have freed theirs.
        held = [len(parts) if most >= saved else place for place, most in enumerate(own, 1)]
        ends = [
            max([Highest(saved, begun, len(parts)), *map(Highest, own, behind, held)], key=lambda row: row.total)
            for begun, behind in ((0, [whole - reached for reached in left]), (whole, left))
        ]
        return cls(saved, saved_by, max(forward, saved), max(saved, *own), whole, *ends)

    def backward_of(self, done: int, microbatches: int) -> Highest:
        """The most while the backward of a microbatch runs, after `done` others in this step."""
        ends = {0: self.first, microbatches - 1: self.last}
        return ends.get(done, Highest(self.backward, self.whole, len(self.saved_by) - 1))


@dataclass(frozen=True)
class HighPoint:
    """Memory at the highest point of one action, by kind.

    in_flight: by stage, the microbatches that activations are there of. parts: of the action's own microbatch only
    those of so many parts are.
    """

    action: Action
    held: Mapping[str, int]
    in_flight: Mapping[int, int]
    parts: int

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(self.held.values())

    def saved(self, parts: Mapping[int, Sequence[PartFigures]]) -> list[Saved]:
        """The activations by part, in the order of the model; equal layers are together. parts: by stage."""
        counts: Counter[tuple[str, int]] = Counter()
        for stage, count in self.in_flight.items():
            for place, part in enumerate(parts[stage]):
                freed = stage == self.action.stage and place >= self.parts
                counts[part.name, part.saved] += count - freed
        return [Saved(*key, count) for key, count in counts.items()]


def memory_along(
    actions: Sequence[Action],
    stages: Mapping[int, StageFigures],
    *,
    num_stages: int,
    microbatches: int,
    sent_bytes: int,
    arrived: Arrivals | None = None,
    sends: Collection[int] = (),
    returns: Collection[int] = (),
    ahead: int = 0,
) -> list[HighPoint]:
    """The highest point of each action of a rank.

    stages: by number, those of the rank. sent_bytes: what one stage sends the next for a microbatch. A stage keeps what
    it has received of the microbatches in flight, and in a backward the gradient that it has received. sends, returns:
    stages that send activations, and gradients, to another rank. arrived: as of `arrivals`; None where a stage waits
    for a send before the next forward. ahead: so many receives are posted before the action that needs them.
    """
    back: set[tuple[int, int]] = set()  # gradients sent that are not known to have been used
    under_way: set[tuple[int, int]] = set()  # activations sent that are not known to have been used
    in_flight = dict.fromkeys(stages, 0)
    done = dict.fromkeys(stages, 0)  # backwards that have made gradients of parameters
    moments = []
    for action in actions:
        stage = stages[action.stage]
        in_flight[action.stage] += action.kind == "F"
        alive = sum(count * stages[one].saved for one, count in in_flight.items())
        waiting = sum(stages[one].whole for one in stages if 0 < done[one] < microbatches)
        begun = stage.whole if 0 < done[action.stage] < microbatches else 0
        parts = len(stage.saved_by) - 1
        if action.kind == "F":
            highest = Highest(stage.forward, begun, parts)
        elif action.kind in ("B", "I"):
            highest = stage.backward_of(done[action.stage], microbatches)
        else:  # weight gradients that were put off have kept what the forward saved
            highest = Highest(stage.saved, begun, parts)
        saved = stage.saved_by[highest.parts]
        held = {ACTIVATIONS: alive - stage.saved + saved, WORKING: highest.own - saved}
        received = sum(count for one, count in in_flight.items() if one > 0)
        received += action.kind != "F" and action.stage < num_stages - 1
        place = action.stage, action.microbatch
        if action.kind in ("B", "I"):
            known = microbatches if arrived is None else arrived.outputs.get(place, 0)
            under_way = {sent for sent in under_way if sent[0] != action.stage or sent[1] >= known}
        elif action.kind == "F" and arrived is not None and action.stage > 0:
            back = {sent for sent in back if not arrived.used(sent, place)}
            under_way = {sent for sent in under_way if not passed(sent, place)}
        received += ahead + len(back) + len(under_way)
        held |= {WHOLE: waiting - begun + highest.waiting, RECEIVED: received * sent_bytes}
        moments.append(HighPoint(action, held, dict(in_flight), highest.parts))
        if action.kind == "F":
            under_way = set() if arrived is None else under_way
            under_way |= {place} if action.stage in sends else set()
        if arrived is not None and action.kind in ("B", "I") and action.stage in returns:
            back.add(place)
        ends = action.kind in ("B", "W")
        done[action.stage] += ends
        in_flight[action.stage] -= ends
    return moments

"""Activation memory during a step: the schedule's order of forwards and backwards, with the figures of the parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core.pipeline_parallel.schedules import Arrivals, passed
from core_plan.schedule_order import Action
from core_plan.step_figures import PartFigures

ACTIVATIONS, WORKING, RECEIVED = "activations", "working memory of a layer", "received and sent activations"
WHOLE = "whole gradients of microbatches"
STEP_KINDS = (ACTIVATIONS, WORKING, WHOLE, RECEIVED)


class Highest(NamedTuple):
    """Peak bytes during an action."""

    own: int  # bytes of the action itself
    waiting: int  # bytes of full gradients that wait for the last backward
    parts: int  # number of first parts of the stage whose saved tensors are still alive


class Saved(NamedTuple):
    """Tensors that one part of a stage saves."""

    part: str
    each: int  # bytes of one microbatch
    copies: int  # number of microbatches

    @property
    def nbytes(self) -> int:
        """Bytes of all microbatches."""
        return self.each * self.copies


@dataclass(frozen=True)
class StageFigures:
    """Figures of one stage, for one microbatch, in bytes."""

    saved: int
    saved_by: Sequence[int]  # the first n parts save, for each n from 0
    forward: int  # at the peak
    backward: int  # at the peak
    whole: int  # full gradients that wait for the last microbatch, if a rank keeps only its shard
    first: Highest  # in the first backward of a step, which creates these gradients
    last: Highest  # in the last backward of a step, which frees them

    @classmethod
    def of(cls, parts: Sequence[PartFigures], whole: int = 0) -> StageFigures:
        """Combine parts that run one after the other: earlier ones have saved, and later ones have freed."""
        forward = elements = 0
        saved_by = [0]
        own, waiting = [], []  # for each part: bytes during its backward; elements up to its last parameter
        for part in parts:
            before = saved_by[-1]
            forward = max(forward, before + part.forward)
            own.append(before + max(part.saved, part.backward))
            saved_by.append(before + part.saved)
            elements += sum(numel for numel, _ in part.params)
            waiting.append(elements)
        saved = saved_by[-1]
        left = [whole * reached // max(1, elements) for reached in waiting]
        # If fewer bytes are alive than all parts saved, later parts have freed theirs.
        held = [len(parts) if most >= saved else place for place, most in enumerate(own, 1)]
        ends = [
            max([Highest(saved, begun, len(parts)), *map(Highest, own, behind, held)], key=lambda row: sum(row[:2]))
            for begun, behind in ((0, [whole - reached for reached in left]), (whole, left))
        ]
        return cls(saved, saved_by, max(forward, saved), max(saved, *own), whole, *ends)

    def backward_of(self, done: int, microbatches: int) -> Highest:
        """Return the peak of a microbatch's backward, after ``done`` others in this step."""
        ends = {0: self.first, microbatches - 1: self.last}
        return ends.get(done, Highest(self.backward, self.whole, len(self.saved_by) - 1))


@dataclass(frozen=True)
class HighPoint:
    """Memory at the highest point of one action, by kind."""

    action: Action
    held: Mapping[str, int]  # bytes by kind
    in_flight: Mapping[int, int]  # microbatches with live activations, by stage
    parts: int  # number of parts of the action's own microbatch whose activations are alive

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.held.values())

    def saved(self, parts: Mapping[int, Sequence[PartFigures]]) -> list[Saved]:
        """Return the activations by part, in model order; equal layers are combined. ``parts`` is keyed by stage."""
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
    """Return the highest point of each action of a rank.

    A stage keeps the received activations of the microbatches in flight, and in a backward the received gradient.

    Args:
        actions: Actions of the rank, in order.
        stages: Figures of the rank's stages, by number.
        num_stages: Stages of the pipeline.
        microbatches: Microbatches of a step.
        sent_bytes: Bytes that one stage sends the next for a microbatch.
        arrived: Result of ``arrivals``; None if a stage waits for a send before the next forward.
        sends: Stages that send activations to another rank.
        returns: Stages that send gradients to another rank.
        ahead: Number of receives posted before the action that needs them.
    """
    back: set[tuple[int, int]] = set()  # gradients sent that are not known to have been used
    under_way: set[tuple[int, int]] = set()  # activations sent that are not known to have been used
    in_flight = dict.fromkeys(stages, 0)
    done = dict.fromkeys(stages, 0)  # backwards that have computed parameter gradients
    alive = waiting = inputs = 0  # bytes saved, bytes of full gradients, and activations received, of all stages
    moments = []
    for action in actions:
        number, place = action.stage, (action.stage, action.microbatch)
        stage = stages[number]
        parts = len(stage.saved_by) - 1
        begun = stage.whole if 0 < done[number] < microbatches else 0
        if action.kind == "F":
            in_flight[number] += 1
            alive += stage.saved
            inputs += number > 0
            highest = Highest(stage.forward, begun, parts)
            if arrived is not None and number > 0:
                back = {sent for sent in back if not arrived.used(sent, place)}
                under_way = {sent for sent in under_way if not passed(sent, place)}
        elif action.kind in ("B", "I"):
            highest = stage.backward_of(done[number], microbatches)
            known = microbatches if arrived is None else arrived.outputs.get(place, 0)
            under_way = {sent for sent in under_way if sent[0] != number or sent[1] >= known}
        else:  # deferred weight gradients keep the tensors saved by forward
            highest = Highest(stage.saved, begun, parts)
        saved = stage.saved_by[highest.parts]
        received = inputs + (action.kind != "F" and number < num_stages - 1) + ahead + len(back) + len(under_way)
        held = {
            ACTIVATIONS: alive - stage.saved + saved,
            WORKING: highest.own - saved,
            WHOLE: waiting - begun + highest.waiting,
            RECEIVED: received * sent_bytes,
        }
        moments.append(HighPoint(action, held, dict(in_flight), highest.parts))
        if action.kind == "F":
            under_way = set() if arrived is None else under_way
            under_way |= {place} if number in sends else set()
        elif arrived is not None and action.kind != "W" and number in returns:
            back.add(place)
        if action.kind in ("B", "W"):
            done[number] += 1
            in_flight[number] -= 1
            alive -= stage.saved
            inputs -= number > 0
            waiting += (stage.whole if 0 < done[number] < microbatches else 0) - begun
    return moments

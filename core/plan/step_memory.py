"""Memory of activations along a step: the schedule's order of forwards and backwards over the figures of the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core.plan.schedule_order import Action
from core.plan.step_figures import PartFigures

ACTIVATIONS, WORKING, RECEIVED = "activations", "working memory of a layer", "received and sent activations"
WHOLE = "whole gradients of microbatches"
STEP_KINDS = (ACTIVATIONS, WORKING, WHOLE, RECEIVED)


class Highest(NamedTuple):
    """The most bytes while a backward runs: its own, and beside it whole gradients that wait for the last backward."""

    own: int
    waiting: int


@dataclass(frozen=True)
class StageFigures:
    """One stage, for one microbatch: bytes that its forward saves; the most while forward and backward run.

    whole: bytes of whole gradients, which wait for the last microbatch, where a rank keeps only its shard; else 0. The
    first backward of a step makes them, and the last one gives them away: first, last.
    """

    saved: int
    forward: int
    backward: int
    whole: int
    first: Highest
    last: Highest

    @classmethod
    def of(cls, parts: Sequence[PartFigures], whole: int = 0) -> StageFigures:
        """Those of parts that run one after the other: earlier ones have saved, and later ones have freed."""
        saved = forward = 0
        own, waiting = [], []  # of each part: bytes while its backward runs; elements up to its last parameter
        elements = 0
        for part in parts:
            forward = max(forward, saved + part.forward)
            own.append(saved + part.backward)
            saved += part.saved
            elements += sum(numel for numel, _ in part.params)
            waiting.append(elements)
        left = [whole * reached // max(1, elements) for reached in waiting]
        first = [Highest(most, whole - behind) for most, behind in zip(own, left, strict=True)]
        last = [Highest(most, behind) for most, behind in zip(own, left, strict=True)]
        most = [max([Highest(saved, begun), *rows], key=sum) for begun, rows in ((0, first), (whole, last))]
        return cls(saved, max(forward, saved), max(saved, *own), whole, *most)

    def backward_of(self, done: int, microbatches: int) -> Highest:
        """The most while the backward of a microbatch runs, after `done` others in this step."""
        ends = {0: self.first, microbatches - 1: self.last}
        return ends.get(done, Highest(self.backward, self.whole))


@dataclass(frozen=True)
class Moment:
    """What is alive at the highest point of one action, by kind."""

    action: Action
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(self.held.values())


def memory_along(
    actions: Sequence[Action],
    stages: Mapping[int, StageFigures],
    *,
    num_stages: int,
    microbatches: int,
    sent_bytes: int,
) -> list[Moment]:
    """The highest point of each action of a rank.

    stages: by number, those of the rank. sent_bytes: what one stage sends the next for a microbatch. torch keeps memory
    for what it receives of every microbatch of a step.
    """
    inner = [stage for stage in stages if stage > 0], [stage for stage in stages if stage < num_stages - 1]
    received = microbatches * sent_bytes * sum(map(len, inner))
    alive = 0
    done = dict.fromkeys(stages, 0)  # backwards that have made gradients of parameters
    moments = []
    for action in actions:
        stage = stages[action.stage]
        waiting = sum(stages[one].whole for one in stages if 0 < done[one] < microbatches)
        before = alive - stage.saved
        if action.kind == "F":
            working, before, after = stage.forward, alive, alive + stage.saved
        elif action.kind in ("B", "I"):
            own = stage.backward_of(done[action.stage], microbatches)
            working, after = own.own, before if action.kind == "B" else alive
            waiting += own.waiting - (stage.whole if done[action.stage] else 0)
        else:  # weight gradients that were put off have kept what the forward saved
            working, after = stage.saved, before
        done[action.stage] += action.kind in ("B", "W")
        held = {ACTIVATIONS: before + min(working, stage.saved), WORKING: max(0, working - stage.saved)}
        moments.append(Moment(action, {**held, WHOLE: waiting, RECEIVED: received}))
        alive = after
    return moments

"""Memory of activations along a step: the schedule's order of forwards and backwards over the figures of the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.plan.schedule_order import Action
from core.plan.step_figures import PartFigures

ACTIVATIONS, WORKING, RECEIVED = "activations", "working memory of a layer", "received and sent activations"
STEP_KINDS = (ACTIVATIONS, WORKING, RECEIVED)


@dataclass(frozen=True)
class StageFigures:
    """One stage, for one microbatch: bytes that its forward saves; the most while forward and backward run."""

    saved: int
    forward: int
    backward: int

    @classmethod
    def of(cls, parts: Sequence[PartFigures]) -> StageFigures:
        """Those of parts that run one after the other: earlier ones have saved, and later ones have freed."""
        saved = forward = backward = 0
        for part in parts:
            forward = max(forward, saved + part.forward)
            backward = max(backward, saved + part.backward)
            saved += part.saved
        return cls(saved, max(forward, saved), max(backward, saved))


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
    moments = []
    for action in actions:
        stage = stages[action.stage]
        if action.kind == "F":
            working, after = stage.forward, alive + stage.saved
            before = alive
        elif action.kind in ("B", "I"):
            before = alive - stage.saved
            working, after = stage.backward, before if action.kind == "B" else alive
        else:  # weight gradients that were put off have kept what the forward saved
            before, working, after = alive - stage.saved, stage.saved, alive - stage.saved
        held = {ACTIVATIONS: before + min(working, stage.saved), WORKING: max(0, working - stage.saved)}
        moments.append(Moment(action, {**held, RECEIVED: received}))
        alive = after
    return moments

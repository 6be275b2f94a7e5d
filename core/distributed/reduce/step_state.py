"""StepState: where the gradients of one wrapped model chunk are on their way through a step."""

from __future__ import annotations

from enum import Enum


class StepState(Enum):
    """ACCUMULATING -> LAUNCHING -> LAUNCHED -> REDUCED -> FINAL -> AWAITED -> ACCUMULATING; GradReducer moves it."""

    ACCUMULATING = "accumulating"  # no gradient has come outside no_sync, so no rank has launched a bucket
    LAUNCHING = "launching"  # backward launches buckets
    LAUNCHED = "launched"  # every bucket is in flight; gradients that come now are late
    REDUCED = "reduced"  # whole over the data groups; sync rules may still be due
    FINAL = "final"  # ready for the optimizer
    AWAITED = "awaited"  # a training forward has run since FINAL: some rank may have begun the next step


OPEN = (StepState.ACCUMULATING, StepState.LAUNCHING, StepState.LAUNCHED)


class Launches(Enum):
    """When buckets leave."""

    AT_THE_END = "at the end"  # `start` and `finish` launch all of them
    IN_BACKWARD = "in backward"  # each as soon as its gradients are there
    ONE_BY_ONE = "one by one"  # the same, and backward waits for each, so that nothing overlaps

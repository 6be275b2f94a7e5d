"""The time line of a pipeline: start and end of each action of each position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core_plan.schedule_order import Action

Done = Mapping[tuple[str, int, int], float]  # (kind, stage, microbatch) -> its end


@dataclass(frozen=True)
class TimedAction:
    """One action of one pipeline position, in seconds since the start of the step."""

    place: int
    action: Action
    start_s: float
    end_s: float


def pipeline_spans(
    orders: Sequence[Sequence[Action]], seconds: Mapping[tuple[str, int], float], hop_s: float, num_stages: int
) -> list[TimedAction]:
    """Return the time of each action. An action starts when its rank is free and its inputs have arrived.

    Args:
        orders: Actions of each position, in order.
        seconds: Duration by (kind of action, stage).
        hop_s: Seconds of a message between neighbouring stages.
        num_stages: Stages of the pipeline.
    """
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(orders)
    at = [0] * len(orders)
    spans: list[TimedAction] = []
    left = sum(map(len, orders))
    while left:
        before = left
        for place, order in enumerate(orders):
            while at[place] < len(order):
                action = order[at[place]]
                ready = _ready(action, done, hop_s, num_stages)
                if ready is None:
                    break
                start = max(free[place], ready)
                end = start + seconds[action.kind, action.stage]
                done[action.kind, action.stage, action.microbatch] = end
                spans.append(TimedAction(place, action, start, end))
                free[place] = end
                at[place] += 1
                left -= 1
        if left == before:
            raise ValueError("the order of the pipeline's actions waits for itself")
    return spans


def _ready(action: Action, done: Done, hop_s: float, num_stages: int) -> float | None:
    """Return the time at which an action's inputs have arrived; None if an input is not computed yet."""
    kind, stage, microbatch = action
    if kind == "W":
        return done.get(("I", stage, microbatch))
    if kind == "F":
        if stage == 0:
            return 0.0
        sent = done.get(("F", stage - 1, microbatch))
        return None if sent is None else sent + hop_s
    own = done.get(("F", stage, microbatch))
    if own is None or stage == num_stages - 1:
        return own
    following = done.get(("B", stage + 1, microbatch), done.get(("I", stage + 1, microbatch)))
    return None if following is None else max(own, following + hop_s)


def shared_spans(
    orders: Sequence[Sequence[Action]],
    seconds: Mapping[tuple[str, int], float],
    hop_s: float,
    num_stages: int,
    slower: Callable[[int], float],
) -> list[TimedAction]:
    """Return the time of each action if positions share cores: a waiting position releases its core.

    ``seconds`` are those of a dedicated core, and ``slower`` returns the slowdown factor for a number of working
    positions.
    """
    done: dict[tuple[str, int, int], float] = {}
    at, now = [0] * len(orders), 0.0
    spans: list[TimedAction] = []
    running: dict[int, tuple[float, float]] = {}  # position -> (start, remaining seconds of a core)
    while len(spans) < sum(map(len, orders)):
        coming: list[float] = []  # arrival times of inputs
        for place, order in enumerate(orders):
            if place in running or at[place] == len(order):
                continue
            action = order[at[place]]
            ready = _ready(action, done, hop_s, num_stages)
            if ready is not None and ready <= now:
                running[place] = now, seconds[action.kind, action.stage]
            elif ready is not None:
                coming.append(ready)
        if not running:
            if not coming:
                raise ValueError("the order of the pipeline's actions waits for itself")
            now = min(coming)
            continue
        factor = slower(len(running))
        step = min([left * factor for _, left in running.values()] + [ready - now for ready in coming])
        now += step
        for place, (since, left) in list(running.items()):
            left -= step / factor
            running[place] = since, left
            if left <= 1e-12:
                action = orders[place][at[place]]
                done[action.kind, action.stage, action.microbatch] = now
                spans.append(TimedAction(place, action, since, now))
                at[place] += 1
                del running[place]
    return spans

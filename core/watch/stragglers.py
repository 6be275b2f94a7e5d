"""Stragglers: ranks whose own work in a step takes longer than that of the others, step after step.

Own work is the time of a step in which the main thread does not wait for other ranks. A slow rank keeps all others
waiting, so whole steps take equally long everywhere and say nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from statistics import median, median_low
from typing import Any

from core.watch.waiting import RECENT, steps_of

FACTOR = 1.5  # above the median of the ranks of a stage, in each of the last RECENT steps


def own_times() -> tuple[float, float] | None:
    """The shortest and the median own work of the main thread's last RECENT steps, in seconds; None before those."""
    own_s = list(steps_of(vars(threading.main_thread())).own_s)
    return (min(own_s), median(own_s)) if len(own_s) == RECENT else None


class Stragglers:
    """Remembers which ranks are slow. slow: rank -> how many times the median its work takes."""

    def __init__(self) -> None:
        self.slow: dict[int, float] = {}

    def compare(self, times: Mapping[int, tuple[float, float] | None], members: Mapping[int, Any]) -> list[str]:
        """Return changes in words. times: of each rank, by `own_times`. members: what has `stage`, and its words."""
        known = {rank: time for rank, time in times.items() if time is not None}
        said: list[str] = []
        slow: dict[int, float] = {}
        for rank, (shortest, typical) in known.items():
            others = [time[1] for other, time in known.items() if members[other].stage == members[rank].stage]
            usual = median_low(others)
            if (typical if rank in self.slow else shortest) <= FACTOR * usual:
                continue
            slow[rank] = typical / usual if usual > 0 else float("inf")
            if rank not in self.slow:
                said.append(
                    f"{members[rank]} is slow: it works {typical:.3g} s in a step, and the median of the ranks that do "
                    f"the same is {usual:.3g} s; each of its last {RECENT} steps took more than {FACTOR} times that"
                )
        said += [f"{members[rank]} is as fast as the others again" for rank in self.slow if rank not in slow]
        self.slow = slow
        return said

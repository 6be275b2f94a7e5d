"""Stragglers: ranks whose own work takes longer than the other ranks' work, in many consecutive steps.

Own work is the part of a step in which the main thread does not wait for other ranks. A slow rank makes all others
wait, so total step times are equal everywhere and do not identify it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from statistics import median, median_low
from typing import Any

from core.watch.waiting import RECENT, steps_of

FACTOR = 1.5  # times the median of the ranks of a stage, in each of the last RECENT steps


def own_times() -> tuple[float, float] | None:
    """Return the shortest and the median own work of the main thread's last RECENT steps, in seconds.

    Returns None before that many steps.
    """
    own_s = list(steps_of(vars(threading.main_thread())).own_s)
    return (min(own_s), median(own_s)) if len(own_s) == RECENT else None


class Stragglers:
    """Record of slow ranks.

    Attributes:
        slow: Own work of each slow rank, as a multiple of the median.
    """

    def __init__(self) -> None:
        self.slow: dict[int, float] = {}

    def compare(self, times: Mapping[int, tuple[float, float] | None], members: Mapping[int, Any]) -> list[str]:
        """Update the record from each rank's ``own_times``, and describe ranks that have become slow or fast again."""
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

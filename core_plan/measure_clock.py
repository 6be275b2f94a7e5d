"""Clock: timer of functions on all ranks at once, for the measurements of a device file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from core.groups import agree

ROUNDS = 7  # an odd number: the median is one of them


class Clock:
    """Timer of a function on all ranks at once. `share` scales the usual measuring time."""

    def __init__(self, share: float) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.share = share
        self.round_s = 0.05 * share

    def alone(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call that waits for no other rank, as median of rounds and ranks.

        On a CPU this is processor time.
        """
        if self.device.type == "cuda":
            return self.seconds(run)
        run()
        calls = max(1, min(1000, int(self.round_s / max(self.processor(run, 1), 1e-7))))
        own = statistics.median(self.processor(run, calls) / calls for _ in range(ROUNDS))
        return statistics.median(of_all(own))

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call on the slowest rank, as median of rounds. Collective over all ranks."""
        run()
        once = max(of_all(self._time(run, 1)))
        calls = max(1, min(1000, int(self.round_s / max(once, 1e-7))))  # the same on all ranks
        rounds = [self._time(run, calls, first=run) / calls for _ in range(ROUNDS)]
        return statistics.median(map(max, zip(*of_all(rounds), strict=True)))

    def once(self, run: Callable[[], object]) -> float:
        """Return the seconds of a single call on the slowest rank. Collective over all ranks."""
        return max(of_all(self._time(run, 1)))

    def processor(self, run: Callable[[], object], calls: int) -> float:
        """Return this thread's processor seconds for some calls."""
        start = time.thread_time()
        for _ in range(calls):
            run()
        return time.thread_time() - start

    def _time(self, run: Callable[[], object], calls: int, first: Callable[[], object] | None = None) -> float:
        """Time some calls after a barrier.

        `first` is called once before the timer starts: ranks that share cores leave a barrier at different times.
        """
        dist.barrier()
        if first is not None:
            first()
        self._finish()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        self._finish()
        return time.perf_counter() - start

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def of_all(value: Any) -> list[Any]:
    """Return every rank's value. Collective over all ranks."""
    return list(agree.gather(value, [dist.group.WORLD], "a measurement").values())

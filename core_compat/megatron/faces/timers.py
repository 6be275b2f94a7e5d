"""Timers by name, for ``ModelParallelConfig(timers=Timers(1, "max"))`` and ``finalize_model_grads``.

Names and arguments are Megatron's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from core.groups import agree
from core.watch.waiting import waiting

LEVELS, OPTIONS = (0, 1, 2), ("max", "minmax", "all")


class Timer:
    """Timer of the seconds between start and stop, accumulated until a reset. Both wait for this rank's GPU.

    Args:
        name (str): Name in reports and errors.
        silent (bool, optional): True for a timer that does nothing.
    """

    def __init__(self, name: str, silent: bool = False) -> None:
        self.name, self.silent = name, silent
        self.begun: float | None = None
        self.seconds = 0.0

    def start(self, barrier: bool = False) -> None:
        """Start the timer. With ``barrier`` all ranks start together, which is collective.

        Raises:
            RuntimeError: If it is running.
        """
        if not self.silent:
            if self.begun is not None:
                raise RuntimeError(f"timer {self.name!r} has already been started")
            self.begun = self._now(barrier)

    def stop(self, barrier: bool = False) -> None:
        """Stop the timer. With ``barrier`` all ranks stop together, which is collective.

        Raises:
            RuntimeError: If it is not running.
        """
        if not self.silent:
            if self.begun is None:
                raise RuntimeError(f"timer {self.name!r} is not started")
            self.seconds += self._now(barrier) - self.begun
            self.begun = None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return the seconds so far. A running timer continues."""
        running = self.begun is not None
        if running:
            self.stop(barrier)
        found = self.seconds
        self.seconds = 0.0 if reset else found
        if running:
            self.start()
        return found

    def reset(self) -> None:
        """Reset the time to zero."""
        self.seconds, self.begun = 0.0, None

    @staticmethod
    def _now(barrier: bool) -> float:
        if barrier and dist.is_initialized():
            _barrier()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()


class Timers:
    """Timers created on demand. Timers above ``log_level`` do nothing.

        timers = Timers(1, "max")
        timers("forward", log_level=1).start()

    Args:
        log_level (int): Highest active level.
        log_option (str): Reported times over ranks: 'max', 'minmax' (smallest and largest) or 'all'.

    Raises:
        ValueError: If an option is invalid.
    """

    def __init__(self, log_level: int, log_option: str) -> None:
        if log_level not in LEVELS or log_option not in OPTIONS:
            raise ValueError(f"log_level {log_level!r} is one of {LEVELS} and log_option {log_option!r} of {OPTIONS}")
        self.log_level, self.log_option = log_level, log_option
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer with this name. ``log_level`` is the level of a new timer, by default the highest."""
        level = LEVELS[-1] if log_level is None else log_level
        return self.timers.setdefault(name, Timer(name, silent=level > self.log_level))

    def get_all_timers_string(
        self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> str | None:
        """Format one line per timer with a time, in ms divided by ``normalizer``. Collective.

        Args:
            names (Sequence[str], optional): Names of the timers. Defaults to all.
            normalizer (float, optional): Divisor of the times.
            reset (bool, optional): Reset the timers.
            barrier (bool, optional): All ranks wait for each other before the times are read.

        Returns:
            The text, or ``None`` if no timer has a time.
        """
        shown = {"max": "{1:.2f}", "minmax": "({0:.2f}, {1:.2f})", "all": "{2}"}[self.log_option]
        lines = [
            f"    {name}: {shown.format(min(times), max(times), [round(ms, 2) for ms in times])} ms"
            for name, times in self._of_all_ranks(names, normalizer, reset, barrier).items()
            if max(times) > 0
        ]
        return "\n".join([f"times over ranks ({self.log_option}):", *lines]) if lines else None

    def log(
        self,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print the times on one rank, the last by default. Collective."""
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        here, last = (dist.get_rank(), dist.get_world_size() - 1) if dist.is_initialized() else (0, 0)
        if text is not None and here == (last if rank is None else rank):
            print(text, flush=True)

    def write(
        self,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Call writer.add_scalar(name-time, largest seconds of all ranks, iteration) for each timer. Collective."""
        for name, times in self._of_all_ranks(names, normalizer, reset, barrier).items():
            if writer is not None:
                writer.add_scalar(f"{name}-time", max(times) / 1e3, iteration)

    def _of_all_ranks(
        self, names: Sequence[str] | None, normalizer: float, reset: bool, barrier: bool
    ) -> dict[str, list[float]]:
        if barrier and dist.is_initialized():
            _barrier()
        wanted = [name for name in (self.timers if names is None else names) if name in self.timers]
        mine = {name: self.timers[name].elapsed(reset) * 1e3 / normalizer for name in wanted}
        everybody = agree.gather(mine, None, "timers").values()
        known = dict.fromkeys(name for theirs in everybody for name in theirs)
        return {name: [theirs.get(name, 0.0) for theirs in everybody] for name in known}


def _barrier() -> None:
    with waiting("a timer's barrier", dist.group.WORLD):
        dist.barrier()

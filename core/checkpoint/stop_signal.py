"""StopSignal: SIGTERM, Ctrl-C or a closed terminal on any rank becomes one decision of all ranks, at a step edge."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch.distributed as dist

from core.checkpoint.agreement import Ranks
from core.watch.interrupts import SAME_PRESS_S


class StopSignal:
    """Context manager that records stop signals, so that ranks can agree on them between steps.

    A scheduler that ends a job sends SIGTERM to some or all processes, at different times, and kills the remaining ones
    after a grace period (torchrun: 30 s). A rank that saved or exited on its own would leave the others waiting in
    their next collective.

        with StopSignal() as stop:
            for step in range(first, steps + 1):
                train_step()
                if stop.agreed():                   # True on every rank in the same step
                    save_checkpoint(root, step, chunks, optimizer)
                    break                           # and the process ends with status 0

    A second Ctrl-C interrupts at once. SIGHUP comes from a closed terminal; under nohup it is ignored.

    Args:
        group (ProcessGroup, optional): Process group of all ranks. Defaults to the default group.
        signals (Sequence[signal.Signals], optional): Signals to record.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    ) -> None:
        self.ranks = Ranks(group)
        self.signals = tuple(signals)
        self.requested: signal.Signals | None = None  # first signal that this rank received
        self.reason: str | None = None  # once agreed: the ranks and the signals they received
        self._at_s = 0.0
        self._previous: dict[int, Any] = {}

    def request(self, number: signal.Signals) -> None:
        """Request a stop as a signal would. Only the first request counts."""
        if self.requested is None:
            self.requested, self._at_s = number, time.monotonic()

    def agreed(self) -> bool:
        """Return ``True`` if any rank was requested to stop.

        This is a collective with one small all-reduce, until it has returned ``True`` once.
        """
        if self.reason is None and self.ranks.any(self.requested is not None):
            received = self.ranks.gather(None if self.requested is None else self.requested.name)
            named = [f"rank {self.ranks.global_rank(rank)} got {name}" for rank, name in enumerate(received) if name]
            self.reason = ", ".join(named)
        return self.reason is not None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("StopSignal is entered in a thread; Python delivers signals to the main thread only.")
        for number in self.signals:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # torchrun passes on a first Ctrl-C as SIGINT, and after a second one it sends SIGTERM
        again = number == signal.SIGINT or (number == signal.SIGTERM and self.requested == signal.SIGINT)
        if self.requested is not None and again and time.monotonic() - self._at_s > SAME_PRESS_S:
            raise KeyboardInterrupt
        self.request(signal.Signals(number))

"""StopSignal: SIGTERM or Ctrl-C on any rank becomes one decision of all ranks, at a step edge."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from core.checkpoint.agreement import Ranks

SAME_PRESS_S = 0.5  # a launcher and the terminal may both deliver the same Ctrl-C


class StopSignal:
    """Inside it, signals that ask to stop are noted, and ranks agree on them between steps.

        with StopSignal() as stop:
            for step in range(first, steps + 1):
                train_step()
                if stop.agreed():                   # True on every rank in the same step
                    save_checkpoint(root, step, chunks, optimizer)
                    break                           # and the process ends with status 0

    A scheduler that ends a job sends SIGTERM to some or all processes, at moments that differ, and kills what is left
    after a grace period (torchrun: 30 s). A rank that saved or left by itself would let the others wait in their next
    collective. A second Ctrl-C interrupts at once.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        self.ranks = Ranks(group)
        self.signals = tuple(signals)
        self.requested: signal.Signals | None = None  # what this rank was sent first
        self.reason: str | None = None  # once agreed: which ranks were sent what
        self._at_s = 0.0
        self._previous: dict[int, Any] = {}

    def agreed(self) -> bool:
        """Whether any rank has been asked to stop. Collective: one small all-reduce, until it has been True once."""
        if self.reason is None and self.ranks.any(self.requested is not None):
            asked = self.ranks.gather(None if self.requested is None else self.requested.name)
            named = [f"rank {self.ranks.global_rank(rank)} got {name}" for rank, name in enumerate(asked) if name]
            self.reason = ", ".join(named)
        return self.reason is not None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("StopSignal is entered in a thread; Python delivers signals to the main thread only.")
        for number in self.signals:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT and time.monotonic() - self._at_s > SAME_PRESS_S:
            raise KeyboardInterrupt
        if self.requested is None:
            self.requested, self._at_s = signal.Signals(number), time.monotonic()

"""StopRequest: Ctrl-C ends a run after the step at hand, on all ranks alike, with everything written."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SAME_PRESS_S = 0.5  # a launcher and the terminal may both deliver the same Ctrl-C


class StopRequest:
    """A context manager under which SIGINT and SIGTERM set `requested`; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._at_s = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # signals can be handled nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT and time.monotonic() - self._at_s > SAME_PRESS_S:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._at_s = True, time.monotonic()

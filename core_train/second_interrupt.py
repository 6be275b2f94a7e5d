"""The second Ctrl-C ends a rank, also if its main thread waits in a collective and receives no signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from core import parallel_state
from core.watch.interrupts import INTERRUPTED, SAME_PRESS_S
from core.watch.processes import STOPPED
from core.watch.signals import SignalThread

END_S = 3.0  # after the second Ctrl-C, until a rank that still runs is ended


class EndAtSecondInterrupt:
    """Context manager in which a thread receives this process's signals. Enter it in the main thread.

    Args:
        says: True on the rank that prints the effect of the first Ctrl-C.
    """

    def __init__(self, *, says: bool) -> None:
        self.says = says
        self._first_s: float | None = None
        self._thread = SignalThread(self._hear)

    def __enter__(self) -> EndAtSecondInterrupt:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.stop()

    def _hear(self, number: int) -> None:
        if self._first_s is None:
            if number == signal.SIGINT:
                self._first_s = time.monotonic()
                if self.says:
                    print("the job ends after the running step; Ctrl-C again ends it at once", file=sys.stderr)
        # torchrun passes on the first Ctrl-C as SIGINT, and after a second one it sends SIGTERM
        elif number in (signal.SIGINT, signal.SIGTERM) and time.monotonic() - self._first_s > SAME_PRESS_S:
            threading.Thread(target=_end_soon, name="end", daemon=True).start()


def _end_soon() -> None:
    time.sleep(END_S)
    watch = parallel_state.get_rank_watch()
    for member in [] if watch is None else watch.neighbours:
        if member.state in STOPPED:  # it hears nothing else
            os.kill(member.pid, signal.SIGKILL)
    os._exit(INTERRUPTED)

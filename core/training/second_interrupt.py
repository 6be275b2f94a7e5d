"""The second Ctrl-C ends a rank, also where its main thread waits in a collective and hears no signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import TracebackType

from core import parallel_state
from core.watch.interrupts import INTERRUPTED, SAME_PRESS_S
from core.watch.processes import STOPPED

END_S = 3.0  # after the second Ctrl-C, until a rank that still runs is ended


class EndAtSecondInterrupt:
    """Inside it, a thread hears the signals of this process. A context manager; entered in the main thread.

    Python runs handlers of signals between two steps of the main thread, so never while that waits in C++. But the
    interpreter writes the number of each signal into a pipe at once, and this thread reads it.
    says: True on the rank that prints what the first Ctrl-C does.
    """

    def __init__(self, *, says: bool) -> None:
        self.says = says
        self._first_s: float | None = None
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def __enter__(self) -> EndAtSecondInterrupt:
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="second interrupt", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._previous)
        os.close(self._write)  # the thread reads the end, and closes its side

    def _listen(self) -> None:
        while numbers := os.read(self._read, 1):
            self._hear(numbers[0])
        os.close(self._read)

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

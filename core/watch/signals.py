"""Thread that receives signals, so that Ctrl-C ends every wait in gloo.

Python runs signal handlers between two steps of the main thread, so never while it waits in C++. But the interpreter
immediately writes the number of each signal to a pipe, which a thread can read.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import torch.distributed as dist

from core.watch.interrupts import SAME_PRESS_S
from core.watch.place import NOWHERE, group_of_main_thread, place_of_main_thread
from core.watch.waiting import end_waits_of, forget_wait

STAYS_S = 0.3  # time in one wait after a Ctrl-C, before that wait is ended


class SignalThread:
    """Thread that calls a function with the number of each signal of this process.

    It does not start outside the main thread, or if other code already uses the wakeup pipe.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self.on_signal = on_signal
        self.write = -1

    def start(self) -> None:
        """Start receiving signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            os.close(read)
            os.close(write)
            return
        self.write = write
        _started.add(write)
        _stop_in_forked_processes()
        threading.Thread(target=self._listen, args=(read,), name="core-signals", daemon=True).start()

    def stop(self) -> bool:
        """Stop receiving signals, in the main thread only. Returns True if the thread was active."""
        if self.write == -1 or threading.current_thread() is not threading.main_thread():
            return False
        _release_pipe()
        _started.discard(self.write)
        os.close(self.write)  # the thread reads the end, and closes its side
        self.write = -1
        return True

    def _listen(self, read: int) -> None:
        while numbers := os.read(read, 1):
            self.on_signal(numbers[0])
        os.close(read)


class WaitEnder:
    """Ends the main thread's wait in gloo after a Ctrl-C, between ``start`` and ``stop``.

    A program's own SIGINT handler stays in charge. The group's connections are lost, but an interrupted wait could not
    be completed anyway.
    """

    def __init__(self) -> None:
        self.raised_s = -SAME_PRESS_S  # when KeyboardInterrupt was raised last
        self.thread = SignalThread(self._on_signal)

    def start(self) -> None:
        """Start receiving signals, if called in the main thread."""
        self.thread.start()
        if self.thread.write != -1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.interrupt)

    def stop(self) -> None:
        """Restore the signal handler. May be called twice."""
        if self.thread.stop() and signal.getsignal(signal.SIGINT) == self.interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Record the time, and run Python's own handler."""
        self.raised_s = time.monotonic()
        forget_wait()
        signal.default_int_handler(number, frame)

    def _on_signal(self, number: int) -> None:
        if number != signal.SIGINT or signal.getsignal(signal.SIGINT) != self.interrupt:
            return
        received_s = time.monotonic()
        time.sleep(STAYS_S)
        if self.raised_s < received_s - SAME_PRESS_S and place_of_main_thread(NOWHERE).waits:
            end_waits_of(group_of_main_thread() or dist.group.WORLD)


_started: set[int] = set()  # write ends of the pipes


def _release_pipe() -> None:
    """Stop writing this process's signals to a pipe of this module, which in a forked process is the parent's."""
    current = signal.set_wakeup_fd(-1)
    if current not in _started:  # set by other code
        signal.set_wakeup_fd(current)


@functools.cache
def _stop_in_forked_processes() -> None:
    os.register_at_fork(after_in_child=_release_pipe)

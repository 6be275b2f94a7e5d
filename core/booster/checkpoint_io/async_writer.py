"""AsyncWriter: one thread that writes files in the background, in order. Errors are raised at the next wait."""

from __future__ import annotations

import threading
from collections.abc import Callable


class AsyncWriter:
    """Background thread with at most one job at a time. The interpreter does not exit before the job ends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run a job in the background, after the previous one has ended.

        Raises:
            Exception: The error of the previous job.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-writer")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the job's error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # raised by the next wait, in the thread that saves
            self._error = error

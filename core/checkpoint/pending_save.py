"""One save, from its directory to its commit, as one rank lives it: the work of a background thread or of the caller.

Nothing here is collective. A rank writes its data files and then its part of the manifest, which says that they are
durable; rank 0 commits when the parts of all ranks lie in the directory. So a save whose ranks have all written is
committed even if training stands still, or has died of something else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.checkpoint.commit import KnownIntact, Part, commit_save, wait_for_parts, write_part
from core.checkpoint.errors import explain
from core.checkpoint.root_directory import Committed, RootDirectory, SharedHold
from core.checkpoint.staging_writer import StagingWriter

AFTER_THE_END_S = 10.0  # once training has ended, rank 0 waits for parts while files grow at least so often


@dataclass(frozen=True, slots=True)
class SaveState:
    """Progress of one rank's save."""

    elapsed_s: float
    is_written: bool = False
    committed: Committed | None = None
    error: str | None = None


@dataclass
class PendingSave:
    """A save that has begun. `write` and, on rank 0, `commit` end it; or `run` does both."""

    step: int
    rank: int
    world: int
    root: RootDirectory
    saving: Path
    hold: SharedHold  # keeps the directory from being taken for a leftover
    writer: StagingWriter
    meta: dict[str, Any]
    keep_last: int | None
    timeout_s: float
    known: KnownIntact
    waited_s: float = 0.0
    snapshot_s: float = 0.0
    write_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)
    thread: threading.Thread | None = None
    is_written: bool = False
    committed: Committed | None = None
    error: str | None = None
    _alone_since_s: float | None = None  # training ended with the save in flight: since then, or since the last write
    _bytes_there: int = -1  # in the directory then, of all ranks

    def state(self) -> SaveState:
        """State that this rank sends the others at a step edge."""
        return SaveState(time.monotonic() - self.started_s, self.is_written, self.committed, self.error)

    def write(self) -> None:
        """Make this rank's files and its part durable."""
        start_s = time.monotonic()
        self.writer.write_pending()
        write_part(self.saving, self.rank, self.writer.records)
        self.write_s += time.monotonic() - start_s
        self.is_written = True

    def commit(self) -> Committed:
        """On rank 0: wait for all parts, then make them one checkpoint."""
        parts = wait_for_parts(self.saving, self.world, self._why_wait_no_longer)
        self.committed = self._commit(parts)
        return self.committed

    def run(self) -> None:
        """Write, and commit on rank 0; an error is kept for the next step edge."""
        try:
            self.write()
            if self.rank == 0:
                self.commit()
        except OSError as error:
            self.error = explain(error, self.saving, self.writer.bytes)
        except Exception as error:
            self.error = str(error) or repr(error)

    def start(self) -> None:
        """`run` in a thread of its own, which the interpreter waits for when it ends."""
        self.thread = threading.Thread(target=self.run, name=f"save of step {self.step}")
        self.thread.start()

    def finish_alone(self) -> None:
        """Finish after an exception in training, when the ranks that remain are unknown. Returns at once.

        The thread continues: this rank's files are written; rank 0 waits for those of the others as long as they grow,
        and commits. Then another job may save here. The interpreter does not end before.
        """
        self._alone_since_s = time.monotonic()
        threading.Thread(target=self._close_when_ended, name=f"end of the save of step {self.step}").start()

    def _close_when_ended(self) -> None:
        if self.thread is not None:
            self.thread.join()
        self.hold.release()
        self.root.unlock()

    def cancel(self, limit_s: float) -> bool:
        """Stop writing as soon as possible and let go of the directory; False if the thread is stuck in a write."""
        self.writer.cancelled.set()
        if self.thread is not None:
            self.thread.join(limit_s)
            if self.thread.is_alive():
                return False  # keeps its hold, so that no process deletes the directory under it
        self.hold.release()
        return True

    def _commit(self, parts: list[Part]) -> Committed:
        metadata, results = self.writer.metadata, self.writer.results
        assert metadata is not None, "dcp.save has called `finish` on rank 0"
        return commit_save(
            self.root, self.saving, self.step, parts, metadata, results, self.meta, self.keep_last, self.known
        )

    def _why_wait_no_longer(self) -> str | None:
        if self.writer.cancelled.is_set():
            return "the save was given up because another rank failed"
        if time.monotonic() - self.started_s > self.timeout_s:
            return f"they did not come within {self.timeout_s:g} s"
        if self._alone_since_s is None and not threading.main_thread().is_alive():
            self._alone_since_s = time.monotonic()
        if self._alone_since_s is not None:
            bytes_there = _bytes_in(self.saving)
            if bytes_there != self._bytes_there:  # a rank is writing
                self._bytes_there, self._alone_since_s = bytes_there, time.monotonic()
            if time.monotonic() - self._alone_since_s > AFTER_THE_END_S:
                return f"training has ended here, and nothing was written for {AFTER_THE_END_S:g} s"
        return None


def _bytes_in(directory: Path) -> int:
    """Of the files there now, among which others rename theirs: a name may be gone before its size is read."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat().st_size
    return total

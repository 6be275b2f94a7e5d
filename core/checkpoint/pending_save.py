"""One save on one rank, from its directory to its commit, run by a background thread or by the caller.

Nothing here is collective. A rank writes its data files and then its part of the manifest, which reports that they are
durable. Rank 0 commits when the parts of all ranks are in the directory. A save that all ranks have written is
therefore committed even if training hangs or has crashed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import zlib
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from core.checkpoint.commit import KnownIntact, Part, check_size, part_path, places, wait_for_parts, write_part
from core.checkpoint.durable_file import sync_directory, write_durably
from core.checkpoint.errors import explain
from core.checkpoint.manifest import COMMIT_NAME, MANIFEST_NAME, METADATA_NAME, CommitRecord, Manifest
from core.checkpoint.root_directory import TOKEN, Committed, RootDirectory, SharedHold
from core.checkpoint.save_points import reach
from core.checkpoint.staging_writer import StagingWriter, tensor_records
from core.watch.warn_user import warn_user

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
    """Save that has begun. Call ``write`` and, on rank 0, ``commit``; ``run`` does both."""

    step: int
    rank: int
    world: int
    root: RootDirectory
    saving: Path
    hold: SharedHold  # prevents the directory from being cleaned up as a leftover
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
    _bytes_there: int = -1  # bytes of all ranks in the directory at that time

    def state(self) -> SaveState:
        """Return the state that this rank sends to the others at a step edge."""
        return SaveState(time.monotonic() - self.started_s, self.is_written, self.committed, self.error)

    def write(self) -> None:
        start_s = time.monotonic()
        self.writer.write_pending()
        write_part(self.saving, self.rank, self.writer.records)
        self.write_s += time.monotonic() - start_s
        self.is_written = True

    def commit(self) -> Committed:
        """Wait on rank 0 for the parts of all ranks, then commit them as one checkpoint."""
        parts = wait_for_parts(self.saving, self.world, self._why_wait_no_longer)
        self.committed = self._commit(parts)
        return self.committed

    def run(self) -> None:
        """Write, and commit on rank 0. An error is stored for the next step edge."""
        try:
            self.write()
            if self.rank == 0:
                self.commit()
        except OSError as error:
            self.error = explain(error, self.saving, self.writer.bytes)
        except Exception as error:
            self.error = str(error) or repr(error)

    def start(self) -> None:
        """Call ``run`` in a new thread, for which the interpreter waits at exit."""
        self.thread = threading.Thread(target=self.run, name=f"save of step {self.step}")
        self.thread.start()

    def finish_alone(self) -> None:
        """Finish after an exception in training, when it is unknown which ranks remain. Returns at once.

        The thread continues. This rank's files are written; rank 0 waits for the files of other ranks as long as they
        grow, and commits. Then another job may save here. The interpreter does not exit before that.
        """
        self._alone_since_s = time.monotonic()
        threading.Thread(target=self._close_when_ended, name=f"end of the save of step {self.step}").start()

    def _close_when_ended(self) -> None:
        if self.thread is not None:
            self.thread.join()
        self.hold.release()
        self.root.unlock()

    def cancel(self, limit_s: float) -> bool:
        """Stop writing as soon as possible and release the directory, waiting up to ``limit_s`` seconds for the thread.

        Return ``False`` if the thread is stuck in a write. Its directory then stays locked.
        """
        self.writer.cancelled.set()
        if self.thread is not None:
            self.thread.join(limit_s)
            if self.thread.is_alive():
                return False  # keeps its hold, so that no process deletes the directory under it
        self.hold.release()
        return True

    def _commit(self, parts: list[Part]) -> Committed:
        """Write the index, the manifest and the commit record, each durable before the next, then rename the directory.

        The steps after the rename (moving ``latest``, deleting surplus checkpoints) may fail without harm to this
        checkpoint; a warning reports it.
        """
        metadata, results, saving = self.writer.metadata, self.writer.results, self.saving
        assert metadata is not None, "dcp.save has called `finish` on rank 0"
        records = [record for part in parts for record in part]
        for record in records:
            check_size(saving, record)
        reach("before metadata", 0)
        metadata.storage_data = places(parts, results)
        index = write_durably(saving / METADATA_NAME, pickle.dumps(metadata), 0)
        manifest = Manifest(self.step, len(parts), (*records, index), tensor_records(metadata), self.meta).to_json()
        reach("before manifest", 0)
        write_durably(saving / MANIFEST_NAME, manifest, 0, half_point="half a manifest")
        target = self.root.next_commit(self.step)
        saved_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        commit = CommitRecord(self.step, target.sequence, saved_at, len(manifest), zlib.crc32(manifest))
        reach("before commit record", 0)
        write_durably(saving / COMMIT_NAME, commit.to_json(), 0)
        for rank in range(len(parts)):
            part_path(saving, rank).unlink()
        (saving / TOKEN).unlink()
        sync_directory(saving)
        self.root.commit(saving, target)
        try:
            self.root.move_latest(target)
            if self.keep_last is not None:
                self.known.add(target.path)
                self.root.prune(self.keep_last, self.known.is_intact)
        except OSError as error:
            warn_user(
                f"Step {self.step} is saved, as {target.path}. What comes after a save has failed: "
                f"{explain(error, self.root.path)}. The next save tries again.",
                RuntimeWarning,
            )
        return target

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
    """Return the bytes of the files in a directory.

    Other ranks rename files, so a name may vanish before its size is read.
    """
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat().st_size
    return total

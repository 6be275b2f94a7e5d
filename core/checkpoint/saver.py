"""CheckpointSaver: a job's saves into one root, durable and one at a time, in the foreground or background."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageWriter

from core.checkpoint.agreement import Ranks
from core.checkpoint.commit import KnownIntact
from core.checkpoint.errors import CheckpointError, amount, explain, free_bytes
from core.checkpoint.pending_save import PendingSave
from core.checkpoint.root_directory import TOKEN, RootDirectory, SharedHold, list_committed
from core.checkpoint.save_arguments import FILE_BYTES, checked_meta, checked_step, option_error
from core.checkpoint.snapshot import SnapshotMemory
from core.checkpoint.staging_writer import StagingWriter
from core.watch.warn_user import warn_user

LOCK_LIMIT_S = 5.0  # a job that has just been killed may have children that end a moment later
SHARED_LIMIT_S = 10.0  # network file systems show new files late
LONGEST_PAUSE_S = 0.2


@dataclass(frozen=True)
class SaveReport:
    """Result of one save on this rank.

    Attributes:
        step: Training step.
        committed: True if the checkpoint is complete on all ranks.
        directory: Directory of the checkpoint. None until it is committed.
        asynchronous: True if this rank writes in the background.
        bytes: Bytes that this rank writes, rounded up.
        waited_s: Seconds that ``save`` waited for the previous save to end.
        snapshot_s: Seconds of planning and copying, or of planning and writing if not asynchronous.
        write_s: Seconds of the background thread.
        error: Reason of a failed save.
    """

    step: int
    committed: bool
    directory: Path | None
    asynchronous: bool
    bytes: int
    waited_s: float
    snapshot_s: float
    write_s: float
    error: str | None = None


class CheckpointSaver:
    """Saves a job's checkpoints into ``root``, optionally in the background.

    An asynchronous saver copies the state and writes it while training continues. Every rank of ``group`` creates one
    and calls its methods together.

        with CheckpointSaver("checkpoints", keep_last=3, asynchronous=True) as saver:
            for step in range(1, steps + 1):
                train_step()
                saver.step_edge()  # a failed background save is raised here, on all ranks
                if step % 100 == 0:
                    save_checkpoint("checkpoints", step, chunks, optimizer, saver=saver)

    There is one directory per step. It becomes a checkpoint in one rename, after every file and directory is on disk,
    and no older checkpoint is deleted before that.

    Args:
        root (str | os.PathLike[str]): Root directory. All ranks must see the same file system, which is checked here.
        group (ProcessGroup, optional): Process group of all ranks that save. Defaults to the default group.
        keep_last (int, optional): Number of committed checkpoints to keep. Defaults to all.
        asynchronous (bool, optional): Copy tensors in ``save`` and write them in a background thread.
        on_error (Literal['raise', 'warn'], optional): 'raise' raises the error of a failed save. 'warn' warns, returns
            a report with ``error``, and training continues.
        timeout_s (float, optional): Longest duration of a save in seconds.
        snapshot_limit_bytes (int, optional): A rank whose copy would be larger writes before ``save`` returns, even if
            other ranks do not.
        file_bytes (int, optional): Size at which a rank starts a new data file.

    Raises:
        ValueError: If an argument is invalid on any rank, or differs between ranks.
        CheckpointError: If the root cannot be used, or ranks do not share its file system.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        group: dist.ProcessGroup | None = None,
        *,
        keep_last: int | None = None,
        asynchronous: bool = False,
        on_error: Literal["raise", "warn"] = "raise",
        timeout_s: float = 600.0,
        snapshot_limit_bytes: int | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        given = locals()
        self.ranks = Ranks(group)
        # Each of these decides which collectives a rank calls, or which rank deletes.
        shared = {"keep_last": keep_last, "asynchronous": asynchronous, "on_error": on_error}
        self.ranks.agree_on_arguments(option_error(given), shared)
        self.root = RootDirectory(root)
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        self.on_error = on_error
        self.timeout_s = timeout_s
        self.snapshot_limit_bytes = snapshot_limit_bytes
        self.file_bytes = file_bytes
        self._snapshot = SnapshotMemory()
        self._known_intact = KnownIntact()
        self._in_flight: PendingSave | None = None
        try:
            self.ranks.on_first(self._open_root, self.root.path)
            self._require_shared_root()
        except BaseException:
            self.root.unlock()
            raise

    # --- saving ---

    def save(self, step: int, fill: Callable[[StorageWriter], None], *, meta: Mapping[str, Any]) -> SaveReport:
        """Save one checkpoint. Collective.

        An asynchronous save has copied everything when this returns, so tensors may change. It is committed later, and
        ``step_edge`` reports it. A save still in flight is awaited first.

        Args:
            step: Step number, the same on every rank.
            fill: Called as fill(writer). It must call ``dcp.save(state, storage_writer=writer, process_group=group)``
                exactly once.
            meta: Values for JSON. Rank 0's are stored, and returned as ``CheckpointDirectory.meta``.

        Returns:
            A report of the save from this rank's point of view.

        Raises:
            ValueError: If ``step`` or ``meta`` is invalid on any rank, or ``fill`` did not call ``dcp.save``.
            CheckpointError: If the save failed and ``on_error`` is 'raise'.
        """
        problem: str | None = None
        kept_meta: dict[str, Any] = {}
        try:
            step = checked_step(step)
            kept_meta = checked_meta(meta)
        except ValueError as failure:  # the others wait in the next gather, and must hear of it
            problem = str(failure)
        start_s = time.monotonic()
        before = self.wait()
        waited_s = time.monotonic() - start_s if before is not None else 0.0
        self.ranks.agree_on_arguments(problem, {"step": step})
        try:
            save = self._begin(step, kept_meta, waited_s)
        except CheckpointError as error:
            return self._failed(step, None, str(error))
        try:
            self._fill(save, fill)
        except CheckpointError as error:
            return self._give_up(save, str(error))
        except BaseException:
            save.cancel(self.timeout_s)  # the next save cleans up its files
            raise
        if self.asynchronous:
            save.start()
            self._in_flight = save
            return self._report(save)
        return self._end_here(save)

    def step_edge(self) -> SaveReport | None:
        """Report the save in flight once it has ended.

        Call it once per step on every rank. It is collective while a save is in flight, and free otherwise. A failure
        on any rank is raised, or warned about, on all ranks here.

        Returns:
            The report of a save that has ended, else ``None``.

        Raises:
            CheckpointError: If the save failed on any rank and ``on_error`` is 'raise'.
        """
        save = self._in_flight
        if save is None:
            return None
        states = self.ranks.gather(save.state())
        error = self.ranks.joined([state.error for state in states])
        if not error and states[0].committed is not None:
            return self._ended(save, states[0].committed.path)
        if not error and max(state.elapsed_s for state in states) > self.timeout_s:
            busy = [self.ranks.global_rank(rank) for rank, state in enumerate(states) if not state.is_written]
            error = f"it did not end within {self.timeout_s:g} s" + (f"; ranks {busy} still write" if busy else "")
        return self._give_up(save, error) if error else None

    def wait(self) -> SaveReport | None:
        """Wait until the save in flight, if any, has ended, and return its report. Collective."""
        pause_s = 0.001
        while self._in_flight is not None:
            thread = self._in_flight.thread
            assert thread is not None, "a save in flight has its thread"
            thread.join(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            report = self.step_edge()
            if report is not None:
                return report
        return None

    def close(self) -> SaveReport | None:
        """Wait for the save in flight and allow another job to save here. Collective."""
        try:
            return self.wait()
        finally:
            self.root.unlock()

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.close()
            return
        # Other ranks may have exited, so no collectives. A save that all ranks have written still becomes a checkpoint.
        if self._in_flight is not None:
            self._in_flight.finish_alone()
            self._in_flight = None
        else:
            self.root.unlock()

    # --- steps of a save ---

    def _open_root(self) -> None:
        self.root.create()
        self.root.lock(LOCK_LIMIT_S)

    def _require_shared_root(self) -> None:
        """Raise CheckpointError on all ranks, naming the ranks that do not see the files rank 0 writes."""
        name, text = self.ranks.on_first(self.root.put_token, self.root.path)
        sees = self.ranks.gather(self.root.sees_token(name, text, SHARED_LIMIT_S))
        if self.ranks.rank == 0:
            (self.root.path / name).unlink(missing_ok=True)
        hosts = self.ranks.gather(socket.gethostname())
        blind = [rank for rank, seen in enumerate(sees) if not seen]
        if blind:
            named = ", ".join(f"{self.ranks.global_rank(rank)} ({hosts[rank]})" for rank in blind)
            raise CheckpointError(
                f"ranks {named} cannot see the files that rank {self.ranks.global_rank(0)} ({hosts[0]}) writes to "
                f"{self.root.path}. Give a directory on a file system that all machines share"
            )

    def _begin(self, step: int, meta: dict[str, Any], waited_s: float) -> PendingSave:
        """Create a directory for the save and lock it on every rank. Collective."""
        name = self.ranks.on_first(lambda: self.root.begin(step).name, self.root.path)
        saving = self.root.path / name
        hold: SharedHold | None = None
        error = None
        try:
            hold = self._hold(saving)
        except OSError as failure:
            error = f"cannot hold the new directory: {explain(failure, saving)}"
        try:
            self.ranks.agree(error)
        except CheckpointError:
            if hold is not None:
                hold.release()
            raise
        assert hold is not None, "no rank had an error"
        writer = StagingWriter(
            saving,
            self.ranks.rank,
            file_bytes=self.file_bytes,
            check_space=lambda needed: self._require_space(needed),
            snapshot=self._snapshot if self.asynchronous else None,
            snapshot_limit_bytes=self.snapshot_limit_bytes,
        )
        return PendingSave(
            step, self.ranks.rank, self.ranks.world, self.root, saving, hold, writer, meta, self.keep_last,
            self.timeout_s, self._known_intact, waited_s,
        )  # fmt: skip

    def _hold(self, saving: Path) -> SharedHold:
        until = time.monotonic() + SHARED_LIMIT_S
        while True:
            try:
                return SharedHold(saving / TOKEN)
            except FileNotFoundError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def _require_space(self, needed: int) -> None:
        free = free_bytes(self.root.path)
        if free is not None and free < needed:
            raise CheckpointError(
                f"not enough space: {amount(needed)} are needed for the files of all ranks, {amount(free)} are free at "
                f"{self.root.path}; nothing was written. Free some space, or keep fewer checkpoints (keep_last)"
            )

    def _fill(self, save: PendingSave, fill: Callable[[StorageWriter], None]) -> None:
        start_s = time.monotonic()
        error: str | None = None
        try:
            fill(save.writer)
        except CheckpointException as failure:
            error = _storage_error(failure, self.ranks)
        except CheckpointError as failure:
            error = str(failure)
        errors = self.ranks.gather(error)
        if any(errors):  # dcp.save raises the same text on all ranks
            raise CheckpointError(error if error and len(set(errors)) == 1 else self.ranks.joined(errors))
        save.snapshot_s = time.monotonic() - start_s
        if not save.writer.was_used:
            raise ValueError("`fill` did not call dcp.save with the writer it was given; nothing is saved.")

    def _end_here(self, save: PendingSave) -> SaveReport:
        """Write and commit a synchronous save; every rank receives the result."""
        error = None
        try:
            save.write()
        except (OSError, CheckpointError) as failure:
            error = str(failure) if isinstance(failure, CheckpointError) else explain(failure, save.saving)
        try:
            self.ranks.agree(error)
            directory = self.ranks.on_first(lambda: save.commit().path, save.saving)
        except CheckpointError as failure:
            return self._give_up(save, str(failure))
        return self._ended(save, directory)

    def _ended(self, save: PendingSave, directory: Path) -> SaveReport:
        save.cancel(self.timeout_s)  # the thread has finished its work
        self._in_flight = None
        return self._report(save, directory)

    def _give_up(self, save: PendingSave, error: str) -> SaveReport:
        """Stop on all ranks, clean up, and report the error on all ranks. Collective."""
        self._in_flight = None
        stopped = self.ranks.gather(save.cancel(LOCK_LIMIT_S))
        if self.ranks.rank == 0 and all(stopped):  # else a rank is stuck in a write; a later save cleans up
            shutil.rmtree(save.saving, ignore_errors=True)
        return self._failed(save.step, save, error)

    def _failed(self, step: int, save: PendingSave | None, error: str) -> SaveReport:
        last = self.ranks.on_first(self._last_good)
        message = f"Saving step {step} to {self.root.path} failed: {error.rstrip('.')}. {last}"
        if self.on_error == "raise":
            raise CheckpointError(message)
        if self.ranks.rank == 0:
            warn_user(f"{message} Training continues without this checkpoint.", RuntimeWarning)
        if save is None:
            return SaveReport(step, False, None, False, 0, 0.0, 0.0, 0.0, message)
        return self._report(save, error=message)

    def _last_good(self) -> str:
        try:
            committed = list_committed(self.root.path)
        except CheckpointError as error:
            return str(error)
        if not committed:
            return "There is no earlier checkpoint."
        return f"The last good checkpoint is of step {committed[-1].step}: {committed[-1].path}."

    def _report(self, save: PendingSave, directory: Path | None = None, error: str | None = None) -> SaveReport:
        return SaveReport(
            step=save.step,
            committed=directory is not None,
            directory=directory,
            asynchronous=save.writer.was_copied,
            bytes=save.writer.bytes,
            waited_s=save.waited_s,
            snapshot_s=save.snapshot_s,
            write_s=save.write_s,
            error=error,
        )


def _storage_error(error: CheckpointException, ranks: Ranks) -> str:
    """Return the storage errors by rank. Any other error of dcp.save is raised unchanged."""
    texts: list[str | None] = [None] * ranks.world
    for rank, (failure, _) in error.failures.items():
        if isinstance(failure, OSError):
            texts[rank] = explain(failure, Path(str(failure.filename or "")))
        elif isinstance(failure, CheckpointError):
            texts[rank] = str(failure)
        else:
            raise error
    return ranks.joined(texts)

"""Collective helpers of save and load: exchange small Python values within a group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from core.checkpoint.errors import CheckpointError, explain
from core.groups import agree
from core.watch.waiting import waiting

T = TypeVar("T")


class Ranks:
    """The ranks of a process group, or a single process if torch.distributed is not initialized.

    Every method is collective: all ranks of the group must call it, in the same order. Raises CheckpointError if this
    process does not belong to ``group``.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.started = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.started else 0
        self.world = dist.get_world_size(group) if self.started else 1
        if self.rank < 0:
            raise CheckpointError("This process does not belong to the group that saves and loads checkpoints.")

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, ordered by rank, on every rank."""
        return list(agree.gather(value, self.group, "a checkpoint").values())

    def any(self, flag: bool) -> bool:
        """Return ``True`` if the flag is True on any rank. Needs one small max all-reduce."""
        return agree.any(flag, self.group, "a checkpoint")

    def write(self, planner: SavePlanner, writer: StorageWriter) -> None:
        with self._planning("a save"):
            dcp.save({}, storage_writer=writer, planner=planner, process_group=self.group, no_dist=not self.started)

    def read(self, planner: LoadPlanner, reader: StorageReader) -> None:
        """Run ``dcp.load`` with every rank's planner and reader. Raises CheckpointException if any rank cannot read its
        part.
        """
        with self._planning("a load"):
            dcp.load({}, storage_reader=reader, planner=planner, process_group=self.group, no_dist=not self.started)

    @contextmanager
    def _planning(self, what: str) -> Iterator[None]:
        """Wrap a call of torch.distributed.checkpoint, which issues collectives internally."""
        with warnings.catch_warnings():  # torch warns that it runs in a single process
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            if not self.started:
                yield
                return
            with waiting(f"the other ranks' part of {what}", self.group or dist.group.WORLD, computes=True):
                yield

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank) if self.started and self.group is not None else rank

    def on_first(self, act: Callable[[], T], where: Path | None = None) -> T:
        """Run a function on rank 0. Return its picklable result, or raise its error as CheckpointError, on every rank.

        ``where`` is the directory in which ``act`` works, for the message about a full or unwritable disk.
        """
        answer: T | None = None
        error: str | None = None
        cause: Exception | None = None
        if self.rank == 0:
            try:
                answer = act()
            except Exception as failure:  # catches everything: the other ranks wait in the gather
                cause = failure
                error = str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
                if where is not None and isinstance(failure, OSError):
                    error = explain(failure, where)
        answer, error = self.gather((answer, error))[0]
        if error is not None:
            raise CheckpointError(error) from cause
        return answer  # type: ignore[return-value]

    def agree(self, error: str | None) -> None:
        """Raise the same CheckpointError on all ranks if any rank has an error."""
        errors = self.gather(error)
        if errors.count(None) < len(errors):
            raise CheckpointError(self.joined(errors))

    def agree_on_arguments(
        self, error: str | None, shared: Mapping[str, Any], kind: type[Exception] = ValueError
    ) -> None:
        """Raise the same error on all ranks if arguments are invalid on any rank or differ between ranks.

        ``error`` is the error text if this rank's arguments are invalid, and ``shared`` has the arguments that must be
        the same on every rank, by name.
        """
        everybody = self.gather((error, dict(shared) if error is None else {}))
        if any(text is not None for text, _ in everybody):
            raise kind(self.joined([text for text, _ in everybody]))
        for name in shared:
            values = [given[name] for _, given in everybody]
            odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if odd is not None:
                raise kind(
                    f"{name} is {values[0]!r} on rank {self.global_rank(0)} and {values[odd]!r} on rank "
                    f"{self.global_rank(odd)}; pass the same on every rank"
                )

    def joined(self, errors: Sequence[str | None]) -> str:
        """Merge the errors of all ranks into one message. Ranks with the same text are listed together."""
        by_text: dict[str, list[int]] = {}
        for rank, text in enumerate(errors):
            if text is not None:
                by_text.setdefault(text, []).append(self.global_rank(rank))
        return "; ".join(f"{_named(ranks)}: {text}" for text, ranks in by_text.items())


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

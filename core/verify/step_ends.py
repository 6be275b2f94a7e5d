"""StepEnds: ranks meet in the job's store before a step is compared."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

QUIET_S = 20.0  # a rank that has run further forwards may still end the step, unless nothing comes from it for so long
NEVER = 1 << 30  # number of forwards of a rank whose loop has ended


class Progress(NamedTuple):
    """Numbers of a rank's forwards, noted microbatches, and ends of steps."""

    forwards: int = 0
    notes: int = 0
    ends: int = 0

    def is_beyond(self, other: Progress) -> bool:
        """Return True if this rank has begun a microbatch that the other one has not.

        A loop that notes its microbatches may run the model more often on one rank than on others.
        """
        return self.notes > other.notes or (self.notes == other.notes == 0 and self.forwards > other.forwards)


class StepEnds:
    """Meetings of the ranks of a loop in which only an optimizer's step ends a step.

    A rank that leaves out an optimizer's step runs its next forward while the others begin a comparison. Its
    collectives would be paired with theirs, and gloo would end the process. So no rank begins before all have come.
    """

    def __init__(self) -> None:
        store, name = dist.group.WORLD.get_group_store(), "core.verify.step_ends"
        number = store.add(f"{name}/{dist.get_rank()}", 1)  # equal on all ranks, which check equally many models
        self.store = dist.PrefixStore(f"{name}/{number}", store)
        self.others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        self.mine = Progress()
        self.notes = 0  # of the steps before

    def advance(self, notes: int, *, forwards: int = 0) -> None:
        """Record that a microbatch begins, by its forward or by its note.

        Args:
            notes: Number of microbatches of this step that the loop has noted so far.
            forwards: 1 for a forward.

        Raises:
            ValueError: If another rank has ended the step before this microbatch.
        """
        self._publish(Progress(self.mine.forwards + forwards, self.notes + notes, self.mine.ends))
        for rank, theirs in self._read().items():
            if theirs.ends > self.mine.ends and self.mine.is_beyond(theirs):
                raise _error(dist.get_rank(), self.mine, behind=rank, last=theirs)

    def meet(self, notes: int) -> None:
        """Wait until all ranks end the step.

        Args:
            notes: Number of microbatches of this step that the loop has noted.

        Raises:
            ValueError: If another rank begins a further microbatch in the meantime.
        """
        self.notes += notes
        self._publish(Progress(self.mine.forwards, self.notes, self.mine.ends + 1))
        seen, since = self._read(), time.monotonic()
        while missing := {rank: theirs for rank, theirs in seen.items() if theirs.ends < self.mine.ends}:
            is_quiet = time.monotonic() > since + QUIET_S
            for rank, theirs in missing.items():
                if theirs.is_beyond(self.mine) or (is_quiet and theirs.forwards > self.mine.forwards):
                    raise _error(rank, theirs, behind=dist.get_rank(), last=self.mine)
            time.sleep(0.005)
            before, seen = seen, self._read()
            since = since if seen == before else time.monotonic()

    def leave(self) -> None:
        """Record that this rank makes no further step."""
        with suppress(RuntimeError):  # the store may have ended with its rank
            self._publish(Progress(NEVER, NEVER, self.mine.ends))

    def _publish(self, progress: Progress) -> None:
        self.mine = progress
        self.store.set(str(dist.get_rank()), " ".join(map(str, progress)))

    def _read(self) -> dict[int, Progress]:
        """Return the progress of the other ranks."""
        come = [rank for rank in self.others if self.store.check([str(rank)])]
        values = self.store.multi_get(list(map(str, come))) if come else []
        read = {rank: Progress(*map(int, value.split())) for rank, value in zip(come, values, strict=True)}
        return {rank: read.get(rank, Progress()) for rank in self.others}


def _error(ahead: int, progress: Progress, *, behind: int, last: Progress) -> ValueError:
    what, number, of_last = "forward", progress.forwards, last.forwards
    if number < NEVER and progress.notes > last.notes:
        what, number, of_last = "noted microbatch", progress.notes, last.notes
    does = f"runs {what} {number}" if number < NEVER else "has ended its loop"
    return ValueError(
        f"rank {ahead} {does} without the optimizer's step that rank {behind} makes after {what} {of_last}; their "
        "weights would drift apart. All ranks must step after the same number of microbatches"
    )

"""StepEnds: ranks meet in the job's store before a step is compared."""

from __future__ import annotations

import time
from contextlib import suppress

import torch.distributed as dist

NOTED_S = 60.0  # a loop that calls `note` may run the model more often on one rank than on others
NEVER = 1 << 30  # number of forwards of a rank whose loop has ended


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
        self.forwards = self.ends = 0

    def forward(self) -> None:
        """Record a forward.

        Raises:
            ValueError: If another rank has ended the step before this forward.
        """
        self.forwards += 1
        self._publish()
        for rank, (forwards, ends) in self._read().items():
            if ends > self.ends and forwards < self.forwards:
                raise _error(dist.get_rank(), self.forwards, behind=rank, last=forwards)

    def meet(self, *, notes: bool) -> None:
        """Wait until all ranks end the step.

        Args:
            notes: True if the loop calls `note`.

        Raises:
            ValueError: If another rank runs a further forward in the meantime.
        """
        self.ends += 1
        self._publish()
        late_s = time.monotonic() + (NOTED_S if notes else 0.0)
        while missing := {rank: forwards for rank, (forwards, ends) in self._read().items() if ends < self.ends}:
            ahead, forwards = max(missing.items(), key=lambda entry: entry[1])
            if forwards > self.forwards and time.monotonic() >= late_s:
                raise _error(ahead, forwards, behind=dist.get_rank(), last=self.forwards)
            time.sleep(0.005)

    def leave(self) -> None:
        """Record that this rank makes no further step."""
        self.forwards = NEVER
        with suppress(RuntimeError):  # the store may have ended with its rank
            self._publish()

    def _publish(self) -> None:
        self.store.set(str(dist.get_rank()), f"{self.forwards} {self.ends}")

    def _read(self) -> dict[int, tuple[int, ...]]:
        """Return the numbers of forwards and of ends of the other ranks."""
        come = [rank for rank in self.others if self.store.check([str(rank)])]
        values = self.store.multi_get(list(map(str, come))) if come else []
        read = {rank: tuple(map(int, value.split())) for rank, value in zip(come, values, strict=True)}
        return {rank: read.get(rank, (0, 0)) for rank in self.others}


def _error(ahead: int, forwards: int, *, behind: int, last: int) -> ValueError:
    does = f"runs forward {forwards}" if forwards < NEVER else "has ended its loop"
    return ValueError(
        f"rank {ahead} {does} without the optimizer's step that rank {behind} makes after forward {last}; their "
        "weights would drift apart. All ranks must step after the same number of microbatches"
    )

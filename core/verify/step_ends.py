"""StepEnds: ranks meet in the job's store before a step is compared."""

from __future__ import annotations

import time

import torch.distributed as dist

NOTED_S = 20.0  # a loop that calls `note` may run the model more often on one rank than on others


class StepEnds:
    """Ends of the steps of a loop that only an optimizer's step marks.

    A rank that leaves out an optimizer's step runs its next forward while the others begin a comparison. Its
    collectives would be paired with theirs, and gloo ends the process. So no rank begins before all have come.
    """

    def __init__(self) -> None:
        self.forwards = self.ends = 0
        self.store: dist.Store | None = None
        if dist.get_world_size() > 1 and dist.get_backend() != "fake":
            store, name = dist.group.WORLD.get_group_store(), "core.verify.step_ends"
            number = store.add(f"{name}/{dist.get_rank()}", 1)  # equal on all ranks, which check equally many models
            self.store = dist.PrefixStore(f"{name}/{number}", store)
            self._publish()

    def forward(self) -> None:
        """Record a forward.

        Raises:
            ValueError: If another rank has ended the step before this forward.
        """
        self.forwards += 1
        self._publish()
        for rank, (forwards, ends) in self._others().items():
            if ends > self.ends and forwards < self.forwards:
                raise self._error(ahead=dist.get_rank(), forwards=self.forwards, behind=rank, ended_after=forwards)

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
        while missing := {rank: forwards for rank, (forwards, ends) in self._others().items() if ends < self.ends}:
            ahead, forwards = max(missing.items(), key=lambda entry: entry[1])
            if forwards > self.forwards and time.monotonic() >= late_s:
                raise self._error(ahead, forwards, behind=dist.get_rank(), ended_after=self.forwards)
            time.sleep(0.005)

    def leave(self) -> None:
        """Record that this rank makes no further step."""
        self.forwards = 1 << 30
        self._publish()

    def _publish(self) -> None:
        if self.store is not None:
            self.store.set(str(dist.get_rank()), f"{self.forwards} {self.ends}")

    def _others(self) -> dict[int, tuple[int, ...]]:
        """Return (forwards, ends) of the other ranks that have begun."""
        if self.store is None:
            return {}
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        known = [rank for rank in others if self.store.check([str(rank)])]
        read = self.store.multi_get(list(map(str, known))) if known else []
        return {
            **dict.fromkeys(others, (0, 0)),
            **{r: tuple(map(int, t.split())) for r, t in zip(known, read, strict=True)},
        }

    def _error(self, ahead: int, forwards: int, behind: int, ended_after: int) -> ValueError:
        does = f"runs forward {forwards}" if forwards < 1 << 30 else "has ended its loop"
        return ValueError(
            f"rank {ahead} {does} without the optimizer's step that rank {behind} makes after forward {ended_after}; "
            "their weights would drift apart. All ranks must step after the same number of microbatches"
        )

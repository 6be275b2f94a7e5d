"""What a rank waits for: remembered on the error of a wait that fails, for `lost_ranks` to tell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

import torch.distributed as dist


class waiting:
    """Surrounds a wait for other ranks. Costs under a microsecond where it does not fail.

    what: in words, "the reduction of" (and `name`). group: the ranks waited for, or a list of them.
    """

    __slots__ = ("began", "group", "name", "waited_s", "what")

    def __init__(self, what: str, group: dist.ProcessGroup | Sequence[int], name: str = "") -> None:
        self.what = what
        self.name = name
        self.group = group

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and wait_of(error) is None:  # an inner wait has said it more closely
            self.waited_s = time.monotonic() - self.began
            vars(error)["core_wait"] = self

    @property
    def ranks(self) -> list[int]:
        """The ranks of the group in the job."""
        if isinstance(self.group, dist.ProcessGroup):
            return dist.get_process_group_ranks(self.group)
        return list(self.group)

    def __str__(self) -> str:
        return f"{self.what} {self.name}".strip()


def wait_of(error: BaseException) -> waiting | None:
    """The wait in which an error was raised, if one was."""
    found = vars(error).get("core_wait")
    return found if isinstance(found, waiting) else None

"""What a rank waits for: kept on its thread while it waits, and on the error of a wait that fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType

import torch.distributed as dist


class waiting:
    """Surrounds a wait for other ranks. Costs about a microsecond where it does not fail.

    what: in words, "the reduction of" (and `name`). group: the ranks waited for, or a list of them.
    """

    __slots__ = ("began", "group", "name", "outer", "thread", "waited_s", "what")

    def __init__(self, what: str, group: dist.ProcessGroup | Sequence[int], name: str = "") -> None:
        self.what = what
        self.name = name
        self.group = group

    def __enter__(self) -> None:
        self.began = time.monotonic()
        self.thread = vars(threading.current_thread())
        self.outer = self.thread.get("core_wait")
        self.thread["core_wait"] = self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self.thread["core_wait"] = self.outer
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


def current_wait(thread: threading.Thread) -> waiting | None:
    """The innermost wait that a thread is in, if it is in one."""
    found = vars(thread).get("core_wait")
    return found if isinstance(found, waiting) else None


def wait_of(error: BaseException) -> waiting | None:
    """The wait in which an error was raised, if one was."""
    found = vars(error).get("core_wait")
    return found if isinstance(found, waiting) else None

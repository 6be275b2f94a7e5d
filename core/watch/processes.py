"""Processes of this host, as /proc shows them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

ENDED = frozenset("ZXx")  # states of a process that has ended, and is there for its parent to see
STOPPED = frozenset("Tt")  # by SIGSTOP, or by a debugger


def state_of(pid: int) -> tuple[str, str] | None:
    """(state, start in clock ticks since the host's boot) of a process; None where there is none, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def runs(pid: int) -> bool:
    """True if there is a process of that number that has not ended."""
    state = state_of(pid)
    return state is not None and state[0] not in ENDED


def boot_id() -> str:
    """The id of this boot: it distinguishes hosts of the same name. Raises OSError where there is no /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine_id() -> str:
    """This host, and the space in which it numbers this process: a container may have one of its own."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class RankProcess:
    """One rank's process.

    machine: equal for ranks that see each other's processes. born: the start of the process, because process numbers
    are used again; "" where the system does not say. stage: of the pipeline; ranks of one stage do equal work.
    """

    rank: int
    host: str
    machine: str
    pid: int
    born: str
    stage: int = 0

    @property
    def state(self) -> str | None:
        """State of the process, a letter of /proc; None once it has ended."""
        found = state_of(self.pid)
        return None if found is None or found[1] != self.born or found[0] in ENDED else found[0]

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def this_member(rank: int, stage: int = 0) -> RankProcess:
    """The process that calls it."""
    state = state_of(os.getpid())
    return RankProcess(rank, socket.gethostname(), machine_id(), os.getpid(), "" if state is None else state[1], stage)

"""Processes of this host, from /proc."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

ENDED = frozenset("ZXx")  # states of a process that has ended but was not yet collected by its parent
STOPPED = frozenset("Tt")  # stopped by SIGSTOP, or by a debugger


def state_of(pid: int) -> tuple[str, str] | None:
    """Return a process's state and its start in clock ticks since boot, or None without such a process or /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def runs(pid: int) -> bool:
    """Return True if a process with this number exists and has not ended."""
    state = state_of(pid)
    return state is not None and state[0] not in ENDED


def boot_id() -> str:
    """Return the id of this boot, which distinguishes hosts of the same name. Raises OSError without /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine_id() -> str:
    """Return an id of this host and its process namespace, because a container may have a separate one."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class RankProcess:
    """Process of one rank.

    Attributes:
        rank: Rank in the job.
        host: Name of the host.
        machine: Equal for ranks that can see each other's processes.
        pid: Process number.
        born: Start of the process, because process numbers are reused; "" if unknown.
        stage: Pipeline stage; ranks of one stage do equal work.
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
    """Return the RankProcess of this process."""
    state = state_of(os.getpid())
    return RankProcess(rank, socket.gethostname(), machine_id(), os.getpid(), "" if state is None else state[1], stage)

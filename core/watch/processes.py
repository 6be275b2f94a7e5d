"""Processes of this host, as /proc shows them."""

from __future__ import annotations

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

"""Peak memory of other processes, read from /proc while they work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

KINDS = ("Anonymous:", "Pss_Shmem:")


def resident_bytes(pid: int) -> int:
    """Bytes of memory that a process has touched, without files; of a page that n processes share, 1/n for each.

    So memory that ranks share is counted once, whereas the high-water mark of each rank (VmHWM) holds all of it. Mapped
    files are left out: they are the libraries. Private pages that a forked process still has from its parent count
    whole, or they would seem to grow when either is first written to. OSError where there is no
    /proc/PID/smaps_rollup.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(KINDS))


class PeakWatch:
    """The largest memory seen at `sample()`, by process."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.peak_bytes = {pid: 0 for pid in pids}
        self.samples = 0

    def sample(self) -> None:
        """Look once at every process."""
        for pid in self.peak_bytes:
            self.peak_bytes[pid] = max(self.peak_bytes[pid], resident_bytes(pid))
        self.samples += 1

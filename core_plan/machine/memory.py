"""Memory that the ranks of this machine may use: the machine's, a control group's limit if lower, or a GPU's."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60  # version 1 writes its largest number where there is no limit


def host_memory_bytes(proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that the processes of this machine may use together, as far as the system reports them.

    Containers and SLURM limit a control group. The limits of the group and of each enclosing group count.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_limits(proc, cgroups)])


def _limits(proc: Path, cgroups: Path) -> list[int]:
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, of which only the last group is seen, as the root.
        group = PurePosixPath(path.lstrip("/"))
        for place in (group, *group.parents):
            try:
                text = (root / place / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal() and int(text) < UNLIMITED:
                found.append(int(text))
    return found


def device_memory_bytes(ranks_here: int) -> int | None:
    """Return the bytes of the smallest GPU that ``ranks_here`` ranks would use; None if they would use none."""
    if not Path("/dev/nvidia0").exists():
        return None
    import torch

    if torch.cuda.device_count() < ranks_here:
        return None
    return min(torch.cuda.get_device_properties(device).total_memory for device in range(ranks_here))

"""Number of intra-op threads of a rank: oversubscribed, the same run is ten times slower."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from core_plan.machine.launch import read_number


def intra_op_threads(
    environment: Mapping[str, str], *, requested: int | None, cores: int, local_world_size: int
) -> int:
    """Return the threads of this rank: the flag, else the user's OMP_NUM_THREADS, else cores / local ranks.

    torchrun sets OMP_NUM_THREADS=1 for several ranks, which is ignored. SLURM binds each task to cores, so they are not
    divided again. Raises ConfigError if a variable is no number.
    """
    if requested is not None:
        return max(1, requested)
    from_user = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    set_by_torchrun = "TORCHELASTIC_RUN_ID" in environment and from_user == "1"
    if from_user and not set_by_torchrun:
        return read_number({"OMP_NUM_THREADS": from_user}, "OMP_NUM_THREADS", at_least=1)
    if "SLURM_CPUS_PER_TASK" in environment:
        return read_number(environment, "SLURM_CPUS_PER_TASK", at_least=1)
    return max(1, cores // local_world_size)


def available_cores() -> int:
    """Count the cores that this process may use: its CPU set, and a container's quota, if any."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_file = Path("/sys/fs/cgroup/cpu.max")
    if quota_file.is_file():
        quota, _, period = quota_file.read_text().strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores

"""`--dry-run` of the main job: the plan on this machine, before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

from core.plan.changes import advice
from core.plan.command import DOES_NOT_FIT
from core.plan.device import Device, read_device
from core.plan.plan_run import plan_run
from core.training.config import JobConfig
from core.training.memory import device_memory_bytes, host_memory_bytes


def this_machine(config: JobConfig, ranks_here: int) -> Device:
    """The memory of this machine, or of its GPUs. Its speed is not known; a GPU's figures put changes into an order."""
    of_gpu = None if config.run.device == "cpu" else device_memory_bytes(ranks_here)
    where = "memory of all ranks of this machine" if of_gpu is None else "memory of one GPU of this machine"
    return replace(
        read_device("h100"),
        name="this machine",
        about=f"{where}; python -m core.plan plans time too",
        memory_bytes=host_memory_bytes() if of_gpu is None else of_gpu,
        is_host=of_gpu is None,
        has_figures=False,
        ranks_per_machine=ranks_here,
    )


def dry_run(config: JobConfig, ranks: int, ranks_here: int, *, says: bool) -> int:
    """Print what a job would hold here; the exit status: 0 if it fits, 1 if not. says: True on one rank of the job."""
    plan = plan_run(config, ranks, this_machine(config, ranks_here))
    if says:
        print(plan.describe())
        if not plan.fits:
            print(advice(config, plan))
    return 0 if plan.fits else DOES_NOT_FIT

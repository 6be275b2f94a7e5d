"""Checks of a job on this machine before anything is allocated: ``--dry-run``, and refusal of jobs that cannot fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from core_plan.command import DOES_NOT_FIT
from core_plan.device import Device, read_device
from core_plan.job.config import JobConfig, RunOptions
from core_plan.job.errors import ConfigError
from core_plan.machine.memory import device_memory_bytes, host_memory_bytes
from core_plan.model_run import ModelRun
from core_plan.report import gib
from core_plan.run_plan import plan_run
from core_plan.suggestions import advice, suggestions_that_fit

MARGIN = 1.25  # factor of the memory: a plan within this error rejects no job that fits


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings of other packages inside: they are repeated when the job runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def this_machine(options: RunOptions, ranks_here: int) -> Device:
    """Return the memory of this machine or its GPUs as a device.

    Its speed is unknown; the figures of a GPU are used to sort suggestions.
    """
    of_gpu = None if options.device == "cpu" else device_memory_bytes(ranks_here)
    where = "memory of all ranks of this machine" if of_gpu is None else "memory of one GPU of this machine"
    return replace(
        read_device("h100"),
        name="this machine",
        about=f"{where}; --device h100 plans for that one, with the time of a step",
        memory_bytes=host_memory_bytes() if of_gpu is None else of_gpu,
        is_host=of_gpu is None,
        headroom=0.0 if of_gpu is None else read_device("h100").headroom,
        has_figures=False,
        ranks_per_machine=ranks_here,
    )


@quietly()
def refuse_what_cannot_fit(config: JobConfig | ModelRun, options: RunOptions, ranks: int, ranks_here: int) -> None:
    """Reject a job whose plan needs more than MARGIN times the memory of this machine.

    Ranks on CPU share a machine's memory, so their sum is compared with it. With several machines it is unknown which
    ranks run here; each is assumed to be the rank that needs least memory.

    Raises:
        ConfigError: If the job cannot fit. The text has the cheapest changes.
    """
    device = this_machine(options, ranks_here)
    try:
        plan = plan_run(config, ranks, device)
    except (ValueError, RuntimeError):  # a job that cannot be planned is not rejected for its memory
        return
    peaks = [memory.peak for memory in plan.memories]
    if not device.is_host:
        needed = max(peaks)
    else:
        needed = ranks_here * sum(peaks) // len(peaks) if ranks == ranks_here else ranks_here * min(peaks)
    if needed <= MARGIN * device.memory_bytes:
        return
    changes = suggestions_that_fit(config, ranks, device)
    advice = f"it would fit with {' or '.join(words for words, _ in changes)}; " if changes else ""
    skip = "--run.no-check-memory"
    skip = config.flags.get(skip, skip) if isinstance(config, ModelRun) else skip
    what = f"{ranks_here} ranks of this machine" if device.is_host else f"rank {plan.fullest.rank}"
    raise ConfigError(
        f"{what} would need {gib(needed)} at the peak of a step, but the device has {gib(device.memory_bytes)}; "
        f"{advice}--dry-run lists the memory by kind, and {skip} skips this check"
    )


@quietly()
def dry_run(
    config: JobConfig | ModelRun, options: RunOptions, ranks: int, ranks_here: int, device: str | None, *, says: bool
) -> int:
    """Print the plan of a job on a device, or on this machine, and return the exit status: 0 if it fits, 1 if not.

    ``says`` is True on the one rank that prints.
    """
    plan = plan_run(config, ranks, this_machine(options, ranks_here) if device is None else device)
    if says:
        print(plan.describe())
        if not plan.fits:
            print(advice(config, plan))
    return 0 if plan.fits else DOES_NOT_FIT

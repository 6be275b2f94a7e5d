"""Changes that make a run fit, one at a time, sorted by their cost in time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.number_ranges import divisors
from core_plan.choices import Choice, Sizes, flags_of, with_choice
from core_plan.device import Device
from core_plan.job.config import JobConfig
from core_plan.model_run import ModelRun
from core_plan.run_plan import RunPlan, plan_run, run_of

MOST_RANKS = 16_384


def single_changes(
    config: JobConfig | ModelRun, ranks: int, micro: int
) -> Iterator[tuple[str, JobConfig | ModelRun, int]]:
    """Yield (flags as text, the changed configuration, ranks) for each option that reduces a rank's memory.

    ``micro`` is the microbatch size of the configuration.
    """
    own, sizes = Choice.of(config), Sizes.of(config)
    changed = [own._replace(zero=zero) for zero in range(own.zero + 1, len(STRATEGIES))]
    changed += [own._replace(micro=size) for size in sorted(divisors(micro), reverse=True)[1:]]
    if not own.recompute:
        changed += [own._replace(parts=True)] * sizes.has_parts + [own._replace(recompute=True)]
    for axis in ("tp", "pp", "cp", *["ep"] * (sizes.experts is not None)):
        size = 2 * getattr(own, axis)
        while size <= ranks:
            etp = size if axis == "tp" and own.etp == own.tp else own.etp
            changed.append(own._replace(**{axis: size, "etp": etp}))
            size *= 2
    yield from ((flags_of(config, one, complete=False), with_choice(config, one), ranks) for one in changed)
    more = 2 * ranks
    while more <= MOST_RANKS:
        if isinstance(config, ModelRun):
            rows = config.global_batch_size * (more // ranks if config.is_batch_of_replica else 1)
            yield f"--ranks {more}", replace(config, global_batch_size=rows), more
        else:
            yield f"--run.ranks {more}", config, more
        more *= 2


def suggestions_that_fit(
    config: JobConfig | ModelRun, ranks: int, device: Device, most: int = 3
) -> list[tuple[str, RunPlan]]:
    """Return at most ``most`` (flags, plan) of changes after which a run fits, fastest first.

    For each option only the first value that fits is returned. More ranks come last, because they cost more than time.
    """
    found: dict[str, tuple[str, RunPlan]] = {}
    micro = run_of(config, ranks, device).source.micro_batch_size
    for words, changed, wanted in single_changes(config, ranks, micro):
        option = words.split()[0]
        with contextlib.suppress(ValueError, RuntimeError):  # such a layout cannot be built
            plan = plan_run(changed, wanted, device) if option not in found else None
            if plan is not None and plan.fits:
                found[option] = words, plan
    in_order = sorted(found.values(), key=lambda item: (item[1].run.grid.world_size, item[1].time.seconds))
    return in_order[:most]


def advice(config: JobConfig | ModelRun, plan: RunPlan) -> str:
    """Return the changes as text, for a plan that does not fit."""
    ranks, before, device = plan.run.grid.world_size, plan.time.seconds, plan.device
    changes = suggestions_that_fit(config, ranks, device)
    if not changes:
        more = ""
        for _, changed, wanted in single_changes(config, ranks, 1):
            with contextlib.suppress(ValueError, RuntimeError):
                if wanted > ranks and run_of(changed, wanted, device):  # its batch may not divide by more ranks
                    more = ", or take more ranks"
        return f"no single change makes it fit; change several{more}"
    lines = ["it would fit with one of these:"]
    for words, found in changes:
        pace = f"{found.time.seconds / before:.2f} times the time of a step" if device.has_figures else ""
        room = f"{found.fullest.peak / 2**30:.2f} of {found.room / 2**30:.2f} GiB"
        lines.append(f"  {words}  ({', '.join(part for part in (room, pace) if part)})")
    return "\n".join(lines)

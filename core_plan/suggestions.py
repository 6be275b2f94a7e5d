"""Changes that make a run fit, one at a time, sorted by their cost in time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.hugging_face.run.sequence import OVER_CONTEXT
from core.number_ranges import divisors
from core_plan.device import Device
from core_plan.job.config import JobConfig
from core_plan.job.errors import ConfigError
from core_plan.job.plan import plan_job
from core_plan.model_run import ModelRun, run_of_model
from core_plan.run_plan import RunPlan, plan_run, run_of

MOST_RANKS = 16_384


def larger_sizes(size: int, ranks: int) -> Iterator[int]:
    """Yield larger sizes of an axis up to `ranks`, doubling each time."""
    while (size := 2 * size) <= ranks:
        yield size


def single_suggestions(config: JobConfig, ranks: int) -> Iterator[tuple[str, JobConfig, int]]:
    """Yield (flags as text, the changed configuration, ranks) for each option that reduces a rank's memory."""
    model, parallel, ddp = config.model, config.parallel, config.ddp
    for strategy in STRATEGIES[STRATEGIES.index(ddp.strategy) + 1 :]:
        changed = replace(
            ddp,
            data_parallel_sharding_strategy=strategy,
            use_distributed_optimizer=True,
            overlap_param_gather=ddp.overlap_param_gather and strategy != "optim_grads_params",
        )
        yield f"--ddp.data-parallel-sharding-strategy {strategy}", replace(config, ddp=changed), ranks
    micro = plan_job(config, ranks).micro_batch_size
    for size in sorted(divisors(micro), reverse=True)[1:]:
        yield f"--run.micro-batch-size {size}", replace(config, run=replace(config.run, micro_batch_size=size)), ranks
    cheap = ["layernorm", "mlp_act", *["moe_act"] * (model.num_experts is not None)]
    for parts in (cheap, [*cheap, "core_attn"]) if model.recompute_granularity is None else ():
        words = f"--model.recompute-granularity selective --model.recompute-modules {' '.join(parts)}"
        selective = replace(model, recompute_granularity="selective", recompute_modules=tuple(parts))
        yield words, replace(config, model=selective), ranks
    if model.recompute_granularity != "full":
        recomputed = replace(config, model=replace(model, recompute_granularity="full"))
        yield "--model.recompute-granularity full", recomputed, ranks
    for axis in ("tp", "pp", "cp", *["ep"] * (model.num_experts is not None)):
        for size in larger_sizes(getattr(parallel, axis), ranks):
            larger: dict[str, Any] = {axis: size}
            yield f"--{axis} {size}", replace(config, parallel=replace(parallel, **larger)), ranks
    more = 2 * ranks
    while more <= MOST_RANKS:
        yield f"--run.ranks {more}", config, more
        more *= 2


def single_model_suggestions(config: ModelRun, ranks: int) -> Iterator[tuple[str, ModelRun, int]]:
    """Yield suggestions as `single_suggestions`, for a Hugging Face model."""
    flag = {**config.flags}
    for zero in range(config.zero + 1, len(STRATEGIES)):
        yield f"--zero {zero}", replace(config, zero=zero), ranks
    source: Any = run_of_model(config, ranks).source
    for size in sorted(divisors(source.micro_batch_size), reverse=True)[1:]:
        yield f"{flag.get('--micro-batch', '--micro-batch')} {size}", replace(config, micro_batch_size=size), ranks
    if not config.recompute:
        yield flag.get("--recompute", "--recompute"), replace(config, recompute=True), ranks
    for axis in ("tp", "pp", *["ep"] * (config.whole.num_experts is not None)):
        for size in larger_sizes(getattr(config, axis), ranks):
            larger: dict[str, Any] = {axis: size}
            yield f"--{axis} {size}", replace(config, **larger), ranks
    mode = config.sequence_parallel
    if mode is None or mode in OVER_CONTEXT:
        words = "" if mode else f" {flag.get('--sequence-parallel', '--sequence-parallel')} {OVER_CONTEXT[0]}"
        for size in larger_sizes(config.cp, ranks):
            yield (
                f"{flag.get('--cp', '--cp')} {size}{words}",
                replace(config, cp=size, sequence_parallel=mode or OVER_CONTEXT[0]),
                ranks,
            )
    more = 2 * ranks
    while more <= MOST_RANKS:
        rows = config.global_batch_size * (more // ranks if config.is_batch_of_replica else 1)
        yield f"--ranks {more}", replace(config, global_batch_size=rows), more
        more *= 2


def _changes(config: JobConfig | ModelRun, ranks: int) -> Iterator[tuple[str, Any, int]]:
    return (
        single_model_suggestions(config, ranks) if isinstance(config, ModelRun) else single_suggestions(config, ranks)
    )


def _takes_more_ranks(config: JobConfig | ModelRun, ranks: int, device: Device) -> bool:
    """Return True if the run can be built on more ranks; its batch may not be divisible by them."""
    for _, changed, wanted in _changes(config, ranks):
        if wanted > ranks:
            with contextlib.suppress(ValueError, RuntimeError):
                run_of(changed, wanted, device)
                return True
    return False


def suggestions_that_fit(
    config: JobConfig | ModelRun, ranks: int, device: Device, most: int = 3
) -> list[tuple[str, RunPlan]]:
    """Return the changes after which the run fits, fastest first; for each option, the first value that fits.

    More ranks come last, because they cost more than time.

    Args:
        config: The configuration that does not fit.
        ranks: Its number of ranks.
        device: The device of each rank.
        most: Number of changes to return.
    """
    found: dict[str, tuple[str, RunPlan]] = {}
    for words, changed, wanted in _changes(config, ranks):
        option = words.split()[0]
        if option in found:
            continue
        try:
            plan = plan_run(changed, wanted, device)
        except (ConfigError, ValueError, RuntimeError):  # such a layout cannot be built
            continue
        if plan.fits:
            found[option] = words, plan
    in_order = sorted(found.values(), key=lambda item: (item[1].run.grid.world_size, item[1].time.seconds))
    return in_order[:most]


def advice(config: JobConfig | ModelRun, plan: RunPlan) -> str:
    """Return the changes as text, for a plan that does not fit."""
    ranks, before = plan.run.grid.world_size, plan.time.seconds
    changes = suggestions_that_fit(config, ranks, plan.device)
    if not changes:
        more = ", or take more ranks" if _takes_more_ranks(config, ranks, plan.device) else ""
        return f"no single change makes it fit; change several{more}"
    lines = ["it would fit with one of these:"]
    for words, changed in changes:
        pace = f"{changed.time.seconds / before:.2f} times the time of a step" if plan.device.has_figures else ""
        room = f"{changed.fullest.peak / 2**30:.2f} of {changed.room / 2**30:.2f} GiB"
        lines.append(f"  {words}  ({', '.join(part for part in (room, pace) if part)})")
    return "\n".join(lines)

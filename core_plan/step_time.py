"""Time of a step: work of the parts on a device, the pipeline's order, and communication that is not hidden."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from core.distributed import DistributedDataParallelConfig
from core.distributed.buffer.grad_buffer import dtype_named
from core.distributed.layout.model_plan import ModelPlan, dtype_name
from core.pipeline_parallel.schedules import find_schedule
from core_plan.communication import (
    Communication,
    communication_of,
    gradient_communication,
    layer_communication,
    rule_communication,
)
from core_plan.device import Device
from core_plan.live_memory import BACKWARD, FORWARD, Work
from core_plan.planned_groups import PlannedGroups
from core_plan.run_memory import RankMemory, Run, StageParts
from core_plan.schedule_order import actions_of_ranks
from core_plan.state_bytes import MASTERS, MOMENTS
from core_plan.step_figures import PartFigures
from core_plan.time_line import TimedAction, pipeline_spans, shared_spans

ATTENTION = "scaled_dot_product"  # in the names of attention's kernels
# Parts of a step, by attribute of StepTime, and their names in a table.
SHARES = {
    "compute": "forward and backward",
    "exchanges": "exchanges within layers",
    "bubble": "bubble of the pipeline",
    "slower_ranks": "waits for slower ranks",
    "gradients": "gradients, not hidden",
    "optimizer": "optimizer",
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest pipeline position. The first six, SHARES, add up to the step.

    The bubble is the pipeline's time without the work of its busiest rank. ``gradients`` are reductions and all-gathers
    that are not hidden, and the slowdown of arithmetic by hidden ones. Recomputation does not count in ``flops_per_s``.
    """

    compute: float
    exchanges: float
    bubble: float
    slower_ranks: float
    gradients: float
    optimizer: float
    tokens_per_s: float
    mfu: float
    flops_per_s: float  # all ranks together
    communication: Sequence[Communication]
    spans: Sequence[TimedAction]

    @property
    def seconds(self) -> float:
        """Seconds of the complete step."""
        return float(sum(getattr(self, name) for name in SHARES))


def work_seconds(work: Mapping[Work, int], device: Device) -> float:
    """Return the seconds of operators: each takes the longer of its arithmetic and its memory access.

    A GPU operator takes at least as long as a launch. A CPU adds the overhead around each operator.
    """
    seconds = 0.0
    for operator, count in work.items():
        name = dtype_name(operator.dtype)
        measured = device.operator_s(operator.key, operator.size) if device.operators else None
        if measured is None:
            rate = device.attention_rate if ATTENTION in operator.name else device.matmul_rate
            arithmetic = operator.flops / rate(name, operator.flops) if operator.flops else 0.0
            measured = max(arithmetic, operator.nbytes / device.memory_rate(operator.nbytes))
        overhead = device.operator_overhead_s
        seconds += count * (measured + overhead if device.is_host else max(measured, overhead))
    return seconds * device.turns


def flops_of(table: Mapping[str, float], dtype: torch.dtype) -> float:
    """Return the operations per second in a dtype; fp32's if the device file does not have it."""
    return table.get(dtype_name(dtype), table["float32"])


def optimizer_seconds(state: Mapping[str, int], owned_bytes: int, device: Device, buckets: int = 0) -> float:
    """Return the seconds of an update: gradients are read, master weights and moments read and written."""
    rate = device.optimizer_bandwidth or device.memory_bandwidth
    moved = (owned_bytes + 2 * (state.get(MASTERS, 0) + state.get(MOMENTS, 0))) / rate
    return (moved + buckets * device.optimizer_bucket_s) * device.link_turns


def stage_seconds(parts: Sequence[PartFigures], device: Device) -> dict[str, float]:
    """Return the arithmetic seconds of one stage and microbatch, by phase."""
    return {phase: sum(work_seconds(part.work[phase], device) for part in parts) for phase in (FORWARD, BACKWARD)}


def model_flops(parts: Sequence[PartFigures]) -> Counter[torch.dtype]:
    """Return the operations of one stage and microbatch on one rank, by dtype.

    They are three times the operations of the forward, without recomputation.
    """
    total: Counter[torch.dtype] = Counter()
    for part in parts:
        for work, count in part.work[FORWARD].items():
            total[work.dtype] += 3 * work.flops * count
    return total


def plan_time(run: Run, memories: Sequence[RankMemory], parts: StageParts, device: Device) -> StepTime:
    """Plan the time of a step from the memory of one rank of each pipeline position, in order."""
    microbatches, num_stages = run.microbatches, run.layout.num_stages
    device = device.shared_by(run.grid.world_size)
    groups = [run.groups_of(memory.rank) for memory in memories]
    compute = {
        (phase, stage): seconds for stage, row in parts.items() for phase, seconds in stage_seconds(row, device).items()
    }
    moved = {
        (phase, stage): layer_communication(row, phase, groups[run.layout.rank_of(stage)], device)
        for stage, row in parts.items()
        for phase in (FORWARD, BACKWARD)
    }
    seconds: dict[tuple[str, int], float] = {}
    for stage in parts:
        whole = {
            phase: compute[phase, stage] + sum(row.seconds for row in moved[phase, stage])
            for phase in (FORWARD, BACKWARD)
        }
        halves = dict.fromkeys("IW", whole[BACKWARD] / 2)
        seconds |= {(kind, stage): s for kind, s in {"F": whole[FORWARD], "B": whole[BACKWARD], **halves}.items()}
    spans = _spans(run, groups[0], seconds, device)
    all_busy = [sum(s.end_s - s.start_s for s in spans if s.place == place) for place in range(len(memories))]
    slowest: StepTime | None = None
    for place, memory in enumerate(memories):
        own = [span for span in spans if span.place == place]
        busy, end = all_busy[place], max(span.end_s for span in own)
        slower = min(end, max(all_busy)) - busy
        inner = [
            replace(
                row,
                calls=row.calls * microbatches,
                nbytes=row.nbytes * microbatches,
                seconds=row.seconds * microbatches,
            )
            for s in memory.stages
            for phase in (FORWARD, BACKWARD)
            for row in moved[phase, s]
        ]
        hops = microbatches * sum((s > 0) + (s < num_stages - 1) for s in memory.stages)
        between = (
            [communication_of(groups[place], "pp", "send", hops, hops * run.source.sent_bytes(), device)]
            if hops
            else []
        )
        exchanged = min(busy, sum(row.seconds for row in inner))
        reductions, gathers = gradient_communication(memory.plans, run.ddp, groups[place], device, microbatches)
        rules = rule_communication(memory.plans, run.ddp, groups[place], device)
        buckets = sum(len(layout.buckets) for plan in memory.plans for layout in plan.layout.buffers)
        update = optimizer_seconds(memory.state, owned_bytes(memory.plans), device, buckets)
        last_backward = sum(seconds["B", s] for s in memory.stages)
        reduce_s, gather_s = (sum(row.seconds for row in rows) for rows in (reductions, gathers))
        not_hidden = exposed(run.ddp, device, buckets, reduce_s, gather_s, last_backward, update, busy - exchanged)
        here = StepTime(
            busy - exchanged,
            exchanged,
            end - busy - slower,
            slower,
            not_hidden + sum(row.seconds for row in rules),
            update + device.step_overhead_s * device.link_turns,
            0.0,
            0.0,
            0.0,
            [*inner, *between, *reductions, *gathers, *rules],
            spans,
        )
        if slowest is None or here.seconds > slowest.seconds:
            slowest = here
    assert slowest is not None, "a pipeline has a rank"
    replicas = run.grid.world_size // run.layout.pp
    work = sum((model_flops(row) for row in parts.values()), Counter[torch.dtype]())
    done = sum(flops / flops_of(device.peak_flops, dtype) for dtype, flops in work.items()) * device.turns
    times = microbatches * replicas / slowest.seconds
    return replace(
        slowest,
        tokens_per_s=run.tokens_per_step / slowest.seconds,
        mfu=done * times / run.grid.world_size,
        flops_per_s=work.total() * times,
    )


def least_seconds(run: Run, parts: StageParts, device: Device) -> float:
    """Return a lower bound of a step's seconds: the work of the busiest pipeline position, and its first and last wait.

    A position waits for the first microbatch to come through the stages before its own, and for the gradient of the
    last one to go back through them. Ranks that share cores wait for each other's work instead.
    """
    device = device.shared_by(run.grid.world_size)
    groups, layout = run.groups_of(0), run.layout
    of_part: dict[int, tuple[float, float]] = {}
    for part in (part for row in parts.values() for part in row):
        if id(part) not in of_part:
            arithmetic = stage_seconds([part], device)
            forward_s, backward_s = (
                arithmetic[phase] + sum(row.seconds for row in layer_communication([part], phase, groups, device))
                for phase in (FORWARD, BACKWARD)
            )
            of_part[id(part)] = forward_s, backward_s
    stages = [[sum(column) for column in zip(*(of_part[id(part)] for part in parts[n]), strict=True)] for n in parts]
    busy = [run.microbatches * sum(sum(stages[n]) for n in layout.stages_of(place)) for place in range(layout.pp)]
    if device.turns > 1:
        return sum(busy) / len(busy)
    splits = find_schedule(run.schedule).splits_backward  # only half of a backward holds the next one up
    ways = [0.0]
    for forward_s, backward_s in stages[: layout.pp - 1]:
        ways.append(ways[-1] + forward_s + backward_s / (2 if splits else 1))
    return max(map(sum, zip(busy, ways, strict=True)))


def _spans(
    run: Run, groups: PlannedGroups, seconds: Mapping[tuple[str, int], float], device: Device
) -> list[TimedAction]:
    """Return the time line of the pipeline. Waiting ranks release their cores to other ranks, if cores are shared."""
    num_stages = run.layout.num_stages
    hop_s = (
        communication_of(groups, "pp", "send", 1, run.source.sent_bytes(), device).seconds if num_stages > 1 else 0.0
    )
    orders = actions_of_ranks(run.schedule, run.layout, run.microbatches)
    if device.turns == 1.0 or len(orders) == 1:
        return pipeline_spans(orders, seconds, hop_s, num_stages)
    alone = {action: taken / device.turns for action, taken in seconds.items()}
    replicas = run.grid.world_size // run.layout.pp
    return shared_spans(orders, alone, hop_s, num_stages, lambda busy: max(1.0, busy * replicas / device.cores))


def exposed(
    ddp: DistributedDataParallelConfig,
    device: Device,
    buckets: int,
    reduce_s: float,
    gather_s: float,
    last_backward: float,
    update: float,
    arithmetic: float,
) -> float:
    """Return the seconds of reductions and all-gathers that are not hidden. The last bucket cannot be hidden.

    Hidden ones use part of the device and slow down the arithmetic that hides them. On a host nothing is hidden,
    because a core that adds gradients does nothing else.
    """
    all_s = reduce_s + gather_s
    if device.is_host:
        return all_s
    buckets = max(1, buckets)
    if ddp.overlap_grad_reduce:
        reduce_s = max(reduce_s - last_backward, reduce_s / buckets)
    if ddp.shards_parameters:
        gather_s = max(0.0, gather_s - arithmetic)
    elif ddp.overlap_param_gather:
        gather_s = max(gather_s - update, gather_s / buckets)
    exposed_s = reduce_s + gather_s
    return exposed_s + device.overlap_slowdown * (all_s - exposed_s)


def owned_bytes(plans: Sequence[ModelPlan]) -> int:
    """Return the bytes of gradients that this rank's optimizer reads."""
    return sum(
        bucket.numel // bucket.shards * dtype_named(layout.key.grad_dtype).itemsize
        for plan in plans
        for layout in plan.layout.buffers
        for bucket in layout.buckets
    )

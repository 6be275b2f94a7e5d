"""Time of a step: work of the parts on a device, the pipeline's order, and what travels that nothing hides."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from core.distributed import DistributedDataParallelConfig
from core.distributed.buffer.grad_buffer import dtype_named
from core.distributed.layout.model_plan import ModelPlan, dtype_name, shard_and_replica
from core.plan.device import Device, Link
from core.plan.live_memory import BACKWARD, FORWARD, Work
from core.plan.planned_groups import PlannedGroups
from core.plan.run_memory import RankMemory, Run, StageParts
from core.plan.schedule_order import Action, actions_of_ranks
from core.plan.state_bytes import MASTERS, MOMENTS
from core.plan.step_figures import PartFigures


@dataclass(frozen=True)
class Travel:
    """What one rank sends over one group in a step. link: 'inside' a machine or 'between' machines."""

    group: str
    collective: str
    link: str
    calls: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Span:
    """One action of one pipeline position, in seconds from the begin of the step."""

    place: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the slowest pipeline position. Together they are the step.

    compute: forwards and backwards. exchanges: of activations within layers, and between stages. bubble: waiting for
    other stages. gradients: reductions and gathers that nothing hides. optimizer: the update.
    """

    compute: float
    exchanges: float
    bubble: float
    gradients: float
    optimizer: float
    tokens_per_s: float
    mfu: float
    travels: Sequence[Travel]
    spans: Sequence[Span]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.exchanges + self.bubble + self.gradients + self.optimizer


def work_seconds(work: Mapping[Work, int], device: Device) -> float:
    """Each operator takes as long as its arithmetic or its memory, whichever is longer; a launch at least."""
    seconds = 0.0
    for operator, count in work.items():
        arithmetic = operator.flops / flops_of(device.matmul_flops, operator.dtype) if operator.flops else 0.0
        memory = operator.nbytes / device.memory_bandwidth
        seconds += count * max(arithmetic, memory, device.operator_overhead_s)
    return seconds


def flops_of(table: Mapping[str, float], dtype: torch.dtype) -> float:
    """Operations a second in a dtype; fp32's for one that the device's file does not name."""
    return table.get(dtype_name(dtype), table["float32"])


def link_of(groups: PlannedGroups, name: str, device: Device) -> str:
    """'inside' where all ranks of a group are on one machine, else 'between'."""
    machines = {rank // device.ranks_per_machine for rank in groups.ranks(name)}
    return "inside" if len(machines) == 1 else "between"


def travel(groups: PlannedGroups, name: str, collective: str, calls: int, nbytes: int, device: Device) -> Travel:
    """The time of some calls: each waits once for its farthest rank, and bytes leave one after the other."""
    where = link_of(groups, name, device)
    link: Link = device.inside if where == "inside" else device.between
    return Travel(name, collective, where, calls, nbytes, calls * link.latency_s + nbytes / link.bytes_per_s)


def layer_travels(parts: Sequence[PartFigures], phase: str, groups: PlannedGroups, device: Device) -> list[Travel]:
    """What the layers of one stage exchange for one microbatch."""
    total: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for part in parts:
        for key, (calls, nbytes) in part.sent[phase].items():
            total[key][0] += calls
            total[key][1] += nbytes
    return [travel(groups, *key, calls, nbytes, device) for key, (calls, nbytes) in total.items()]


def gradient_travels(
    plans: Sequence[ModelPlan],
    ddp_config: DistributedDataParallelConfig,
    groups: PlannedGroups,
    device: Device,
    microbatches: int,
) -> tuple[list[Travel], list[Travel]]:
    """(reductions of gradients, gathers of parameters) of a step, bucket by bucket as the wrapper has laid them out."""
    reductions: Counter[tuple[str, str, int]] = Counter()
    gathers: Counter[tuple[str, str, int]] = Counter()
    rounds = microbatches if ddp_config.reduces_every_microbatch else 1
    for plan in plans:
        for layout in plan.layout.buffers:
            shard, replica = shard_and_replica(layout.key.data_group, ddp_config)
            grad, param = (dtype_named(name).itemsize for name in layout.key[:2][::-1])
            for bucket in layout.buckets:
                if ddp_config.sharded:
                    reductions[shard, "reduce_scatter", _part(bucket.numel * grad, groups.size(shard))] += rounds
                    if replica is not None:
                        cut = bucket.numel * grad // max(1, groups.size(shard))
                        reductions[replica, "all_reduce", 2 * _part(cut, groups.size(replica))] += rounds
                    times = 2 * microbatches if ddp_config.shards_parameters else 1
                    gathers[shard, "all_gather", _part(bucket.numel * param, groups.size(shard))] += times
                else:
                    reductions[shard, "all_reduce", 2 * _part(bucket.numel * grad, groups.size(shard))] += rounds
    return _travels(reductions, groups, device), _travels(gathers, groups, device)


def _part(nbytes: int, ranks: int) -> int:
    return nbytes * (ranks - 1) // ranks


def _travels(counted: Mapping[tuple[str, str, int], int], groups: PlannedGroups, device: Device) -> list[Travel]:
    total: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for (name, collective, nbytes), calls in counted.items():
        if groups.size(name) > 1:
            total[name, collective][0] += calls
            total[name, collective][1] += calls * nbytes
    return [travel(groups, *key, calls, nbytes, device) for key, (calls, nbytes) in total.items()]


def optimizer_seconds(state: Mapping[str, int], owned_bytes: int, device: Device) -> float:
    """Gradients are read; masters and moments are read and written; parameters are written."""
    return (owned_bytes + 2 * (state.get(MASTERS, 0) + state.get(MOMENTS, 0))) / device.memory_bandwidth


def pipeline_spans(
    orders: Sequence[Sequence[Action]], seconds: Mapping[tuple[str, int], float], hop_s: float, num_stages: int
) -> list[Span]:
    """When each position does what: an action begins when its rank is free and what it needs has arrived.

    seconds: (kind of action, stage) -> its duration. hop_s: of a message between neighbouring stages.
    """
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(orders)
    at = [0] * len(orders)
    spans: list[Span] = []
    left = sum(map(len, orders))
    while left:
        before = left
        for place, order in enumerate(orders):
            while at[place] < len(order):
                action = order[at[place]]
                ready = _ready(action, done, hop_s, num_stages)
                if ready is None:
                    break
                start = max(free[place], ready)
                end = start + seconds[action.kind, action.stage]
                done[action.kind, action.stage, action.microbatch] = end
                spans.append(Span(place, action, start, end))
                free[place] = end
                at[place] += 1
                left -= 1
        if left == before:
            raise ValueError("the order of the pipeline's actions waits for itself")
    return spans


def _ready(action: Action, done: Mapping[tuple[str, int, int], float], hop_s: float, num_stages: int) -> float | None:
    kind, stage, microbatch = action
    if kind == "F":
        needed: list[tuple[tuple[str, int, int], float]] = [(("F", stage - 1, microbatch), hop_s)] if stage else []
    elif kind == "W":
        needed = [(("I", stage, microbatch), 0.0)]
    else:
        needed = [(("F", stage, microbatch), 0.0)]
        if stage < num_stages - 1:
            following = next((k for k in ("B", "I") if (k, stage + 1, microbatch) in done), None)
            if following is None:
                return None
            needed.append(((following, stage + 1, microbatch), hop_s))
    if any(key not in done for key, _ in needed):
        return None
    return max((done[key] + hop for key, hop in needed), default=0.0)


def stage_seconds(parts: Sequence[PartFigures], device: Device) -> dict[str, float]:
    """Seconds of arithmetic of one stage and microbatch, by phase."""
    return {phase: sum(work_seconds(part.work[phase], device) for part in parts) for phase in (FORWARD, BACKWARD)}


def model_flops(parts: Sequence[PartFigures]) -> Counter[torch.dtype]:
    """Of one stage and microbatch on one rank, by dtype: thrice the forward's, whatever is computed twice."""
    total: Counter[torch.dtype] = Counter()
    for part in parts:
        for work, count in part.work[FORWARD].items():
            total[work.dtype] += 3 * work.flops * count
    return total


def plan_time(run: Run, memories: Sequence[RankMemory], parts: StageParts, device: Device) -> StepTime:
    """The time of a step. memories: one rank of each pipeline position, in order. parts: of all stages."""
    microbatches, num_stages = run.microbatches, run.layout.num_stages
    groups = [run.groups_of(memory.rank) for memory in memories]
    compute = {
        (phase, stage): seconds for stage, row in parts.items() for phase, seconds in stage_seconds(row, device).items()
    }
    moved = {
        (phase, stage): layer_travels(row, phase, groups[run.layout.rank_of(stage)], device)
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
    hop = travel(groups[0], "pp", "send", 1, run.source.sent_bytes() if num_stages > 1 else 0, device)
    orders = actions_of_ranks(run.schedule, run.layout, microbatches)
    spans = pipeline_spans(orders, seconds, hop.seconds if num_stages > 1 else 0.0, num_stages)
    slowest: StepTime | None = None
    for place, memory in enumerate(memories):
        end = max(span.end_s for span in spans if span.place == place)
        arithmetic = microbatches * sum(compute[phase, s] for s in memory.stages for phase in (FORWARD, BACKWARD))
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
        between = [travel(groups[place], "pp", "send", hops, hops * run.source.sent_bytes(), device)] if hops else []
        exchanged = sum(row.seconds for row in inner)
        reductions, gathers = gradient_travels(memory.plans, run.ddp, groups[place], device, microbatches)
        rules = rule_travels(memory.plans, run.ddp, groups[place], device)
        update = optimizer_seconds(memory.state, owned_bytes(memory.plans), device)
        last_backward = sum(seconds["B", s] for s in memory.stages)
        exposed = _exposed(run, memory, reductions, gathers, last_backward, update, arithmetic)
        here = StepTime(
            arithmetic,
            exchanged,
            max(0.0, end - arithmetic - exchanged),
            exposed + sum(row.seconds for row in rules),
            update,
            0.0,
            0.0,
            [*inner, *between, *reductions, *gathers, *rules],
            spans,
        )
        if slowest is None or here.seconds > slowest.seconds:
            slowest = here
    assert slowest is not None, "a pipeline has a rank"
    replicas = run.grid.world_size // run.layout.pp
    done = sum(
        flops / flops_of(device.peak_flops, dtype) * microbatches * replicas
        for row in parts.values()
        for dtype, flops in model_flops(row).items()
    )
    return replace(
        slowest,
        tokens_per_s=run.tokens_per_step / slowest.seconds,
        mfu=done / (run.grid.world_size * slowest.seconds),
    )


def _exposed(
    run: Run,
    memory: RankMemory,
    reductions: Sequence[Travel],
    gathers: Sequence[Travel],
    last_backward: float,
    update: float,
    arithmetic: float,
) -> float:
    """Seconds of reductions and gathers that nothing hides. The last bucket has nothing behind it that could."""
    reduce_s, gather_s = (sum(row.seconds for row in rows) for rows in (reductions, gathers))
    buckets = max(1, sum(len(layout.buckets) for plan in memory.plans for layout in plan.layout.buffers))
    if run.ddp.overlap_grad_reduce:
        reduce_s = max(reduce_s - last_backward, reduce_s / buckets)
    if run.ddp.shards_parameters:
        gather_s = max(0.0, gather_s - arithmetic)
    elif run.ddp.overlap_param_gather:
        gather_s = max(gather_s - update, gather_s / buckets)
    return reduce_s + gather_s


def rule_travels(
    plans: Sequence[ModelPlan], ddp_config: DistributedDataParallelConfig, groups: PlannedGroups, device: Device
) -> list[Travel]:
    """What sync rules add up after the data-parallel reduction, by the contracts."""
    counted: Counter[tuple[str, str, int]] = Counter()
    for plan in plans:
        grads = {slot.name: layout for layout in plan.layout.buffers for slot in layout.slots}
        for name, contract in plan.contracts.items():
            layout = grads[name]
            nbytes = plan.params[name].numel() * dtype_named(layout.key.grad_dtype).itemsize
            kept = nbytes // (layout.shards if ddp_config.sharded else 1)
            for axis in (*contract.partial_over, *contract.averaged_over):
                counted[axis, "all_reduce", 2 * _part(kept, groups.size(axis))] += 1
    return _travels(counted, groups, device)


def owned_bytes(plans: Sequence[ModelPlan]) -> int:
    """Of the gradients that this rank's optimizer reads."""
    return sum(
        bucket.numel // bucket.shards * dtype_named(layout.key.grad_dtype).itemsize
        for plan in plans
        for layout in plan.layout.buffers
        for bucket in layout.buckets
    )

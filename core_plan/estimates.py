"""Estimates: memory and time of thousands of layouts, from shared figures.

Operators, traffic and activations are the same as in the exact plan. There are two differences: state between steps is
computed from the number of parameters instead of buckets, and the pipeline's waiting time from its schedule with stages
of equal length. `core_plan.advice` plans exactly every layout that it shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from typing import Any, NamedTuple

from core.distributed import DistributedDataParallelConfig
from core.distributed.buffer.bucket_pool import pool_numel
from core.distributed.layout.model_plan import shard_and_replica
from core.distributed.layout.param_layout import resolve_bucket_size
from core.distributed.sharded.eviction import WINDOW
from core.groups.rank_grid import DATA_KINDS
from core.pipeline_parallel import PipelineLayout
from core.pipeline_parallel.schedules import find_schedule
from core_plan.choices import Choice
from core_plan.communication import communication_of, layer_communication, param_gathers, part_sent
from core_plan.device import Device
from core_plan.live_memory import BACKWARD, FORWARD
from core_plan.planned_groups import PlannedGroups
from core_plan.run_memory import Run, wrapped_plans
from core_plan.schedule_order import actions_of_ranks
from core_plan.shared_figures import SharedFigures
from core_plan.state_bytes import GATHERED, GRADIENTS, MASTERS, MOMENTS, PARAMETERS, POOL, SCRATCH, state_bytes
from core_plan.step_figures import Params, PartFigures
from core_plan.step_memory import StageFigures
from core_plan.step_time import exposed, optimizer_seconds, stage_seconds
from core_plan.time_line import pipeline_spans


class Estimate(NamedTuple):
    """Estimate of one layout: bytes of the fullest rank (`peak`) and seconds of a step."""

    choice: Choice
    peak: int
    seconds: float


class LayerCosts(NamedTuple):
    """Costs of one stage and one microbatch.

    Attributes:
        saved: Bytes saved for backward.
        highest: Bytes at the highest point.
        forward_s: Seconds of forward.
        backward_s: Seconds of backward.
        exchanges: Seconds of these that are communication.
    """

    saved: int
    highest: int
    forward_s: float
    backward_s: float
    exchanges: float


class InFlight(NamedTuple):
    """A moment of one pipeline position.

    Attributes:
        counts: For each of its stages, the microbatches with live activations.
        has_begun: For each stage, True between its first backward of a step and the end of its last one.
    """

    counts: tuple[int, ...]
    has_begun: tuple[bool, ...]


class Order(NamedTuple):
    """A schedule's order by pipeline position, if a forward takes 1 and a backward 2.

    Attributes:
        in_flight: Moments with most live activations, before the first backward and after it.
        waits: Time until the position is done, without its own work.
        hops: Messages between stages that a step waits for.
    """

    in_flight: tuple[tuple[InFlight, ...], ...]
    waits: tuple[float, ...]
    hops: float


class Position(NamedTuple):
    """One pipeline position.

    Attributes:
        numbers: Its stages.
        params: (elements, True for an expert's) of its parameters, in model order.
        elements: Parameter elements of each of its stages.
        tied: Elements of an embedding that another position also has.
        is_first: True for the first position.
        kind: Equal for positions with equal parameters.
    """

    numbers: tuple[int, ...]
    params: Params
    elements: tuple[int, ...]
    tied: int
    is_first: bool
    kind: int


class State(NamedTuple):
    """State of a position between steps, with the cost of its update and reductions.

    Attributes:
        total: Bytes.
        waiting: For each stage, bytes of full gradients between its first and last backward.
        update_s: Seconds of the optimizer.
        buckets: Number of buckets.
        tied: Bytes sent to the other copy of an embedding.
        sent: For each data group, its name, the calls, and the bytes of one reduction and of one all-gather.
    """

    total: int
    waiting: tuple[int, ...]
    update_s: float
    buckets: int
    tied: int
    sent: Sequence[tuple[str, int, int, int]]


class Sharding(NamedTuple):
    """A ZeRO stage's configuration, with the bytes per stored element by kind; for scratch memory, all bytes."""

    ddp: DistributedDataParallelConfig
    each: Mapping[str, float]

    @classmethod
    def of(cls, run: Run) -> Sharding:
        """Read the sharding from the first rank of any run of a model."""
        groups = run.groups_of(0)
        chunks = wrapped_plans(run, groups)
        state = state_bytes(chunks, run.ddp, run.optimizer, groups, on_cpu=run.on_cpu, one_host=run.one_host).device
        kept: Counter[str] = Counter()
        for layout in (layout for _, plan in chunks for layout in plan.layout.buffers):
            params, grads, states = run.ddp.residency.spread(
                groups.size(shard_and_replica(layout.key.data_group, run.ddp)[0])
            )
            for kind, ranks in ((PARAMETERS, params), (GRADIENTS, grads), (MASTERS, states), (MOMENTS, states)):
                kept[kind] += layout.numel // ranks
        return cls(run.ddp, {SCRATCH: state.get(SCRATCH, 0), **{kind: state[kind] / kept[kind] for kind in kept}})


class Estimates:
    """Estimates of the layouts of one model on a number of ranks. `shardings` has the Sharding for each `zero`."""

    def __init__(self, device: Device, ranks: int, figures: SharedFigures, shardings: Mapping[int, Sharding]) -> None:
        self.device = device.shared_by(ranks)
        self.figures = figures
        self.shardings = shardings

    def of_layout(self, choice: Choice, run: Run, micros: Sequence[int]) -> Iterator[Estimate]:
        """Estimate all microbatch sizes and all shardings of one layout.

        Args:
            choice: The layout.
            run: Its run with one sequence per microbatch and any `zero`.
            micros: Microbatch sizes, in sequences.
        """
        groups, layout = run.groups_of(0), run.layout
        parts = [run.source.parts_of_stage(layout, number) for number in range(layout.num_stages)]
        wanted = list(dict.fromkeys(part for row in parts for part in row))
        zeros = [zero for zero in self.shardings if groups.size("dp_cp") > 1 or zero == min(self.shardings)]
        states: dict[tuple[int, int, bool], State] = {}
        places: list[Position] = []
        for micro in micros:
            count = run.microbatches // micro
            figures = self.figures.at(choice.split, run, micro, wanted)
            costs = {part: self._stage(figures[part], groups) for part in wanted}
            stages = {
                row: joined([costs[part] for part in row], [figures[part] for part in row])
                for row in dict.fromkeys(map(tuple, parts))
            }
            rows = [stages[tuple(row)] for row in parts]
            places = places or places_of(run, parts, figures)
            source: Any = run.source
            sent = replace(source, micro_batch_size=micro).sent_bytes() if layout.num_stages > 1 else 0
            hop = communication_of(groups, "pp", "send", 1, sent, self.device).seconds if sent else 0.0
            order = order_of(run.schedule, layout, count)
            held = [activations_of(place, rows, order, sent) for place in places]  # (bytes, has_begun)
            mean = sum(row.forward_s + row.backward_s for row in rows) / len(rows)
            busy = max(count * sum(rows[n].forward_s + rows[n].backward_s for n in place.numbers) for place in places)
            # The slowest position sets the pace of all. A rank that waits on a shared core releases it.
            ends = [busy + wait * mean / 3 / self.device.turns + order.hops * hop for wait in order.waits]
            for zero in zeros:
                here = replace(run, ddp=self.shardings[zero].ddp, microbatches=count)
                behind = {}
                for place in places:
                    key = zero, place.kind, count > 1
                    if key not in states:
                        states[key] = self._state(zero, here, place, groups)
                    if place.kind not in behind:
                        behind[place.kind] = self._behind(here, place, states[key], groups, rows)
                peak = 0
                for place, moments in zip(places, held, strict=True):
                    state = states[zero, place.kind, count > 1]
                    for activations, has_begun in moments:
                        waiting = sum(compress(state.waiting, has_begun))
                        peak = max(peak, state.total + activations + waiting)
                seconds = max(end + behind[place.kind] for place, end in zip(places, ends, strict=True))
                yield Estimate(choice._replace(zero=zero, micro=micro), peak, seconds)

    def _stage(self, part: PartFigures, groups: PlannedGroups) -> LayerCosts:
        """Return the costs of a stage with one part."""
        seconds = stage_seconds([part], self.device)
        moved = {
            phase: sum(row.seconds for row in layer_communication([part], phase, groups, self.device))
            for phase in seconds
        }
        forward_s, backward_s = (seconds[phase] + moved[phase] for phase in (FORWARD, BACKWARD))
        return LayerCosts(part.saved, max(part.forward, part.backward), forward_s, backward_s, sum(moved.values()))

    def _state(self, zero: int, run: Run, place: Position, groups: PlannedGroups) -> State:
        """Return the state of a position between steps."""
        each, ddp = self.shardings[zero].each, run.ddp
        residency = ddp.residency
        mapped = run.on_cpu and run.one_host and ddp.share_host_memory
        held: Counter[str] = Counter({SCRATCH: int(each[SCRATCH])})
        sent = []
        count = owned = 0
        for is_expert, name in enumerate(DATA_KINDS):
            numels = [numel for numel, expert in place.params if expert == bool(is_expert)]
            if not numels:
                continue
            buckets = buckets_of(numels, ddp, groups.size(name), one_bucket=not place.is_first)
            count += len(buckets)
            numel, shards = sum(numels), groups.size(shard_and_replica(name, ddp)[0])
            spread = residency.spread(shards)
            kept = numel // spread.states
            owned += int(each[GRADIENTS] * kept)
            if shards > 1:
                cut = (shards - 1) / shards
                grads = int(each[GRADIENTS] * numel * cut * (1 if spread.states > 1 else 2))
                sent.append((name, len(buckets), grads, int(each[PARAMETERS] * numel)))
            held[GRADIENTS] += int(each[GRADIENTS] * numel) // spread.grads
            held[PARAMETERS] += int(each[PARAMETERS] * numel) // spread.params
            held[MASTERS] += int(each[MASTERS] * kept)
            held[MOMENTS] += int(each[MOMENTS] * kept)
            held[POOL] += 0 if residency.keeps_whole else int(each[GRADIENTS] * pool_numel(buckets))
            if spread.params > 1 and not mapped:
                together = max(sum(buckets[n : n + WINDOW + 1]) for n in range(len(buckets)))
                if not ddp.reshard_after_forward:
                    together = numel
                held[GATHERED] += int(each[PARAMETERS] * together)
        tied = int(each[GRADIENTS] * place.tied) // residency.spread(groups.size("dp_cp")).states
        waiting = tuple(int(each[GRADIENTS] * numel) * run.gradients_wait for numel in place.elements)
        update_s = optimizer_seconds(held, owned, self.device, count)
        return State(sum(held.values()), waiting, update_s, max(1, count), tied, sent)

    def _behind(
        self, run: Run, place: Position, state: State, groups: PlannedGroups, rows: Sequence[LayerCosts]
    ) -> float:
        """Return the seconds of the update, and of reductions and all-gathers that are not hidden."""
        ddp = run.ddp
        device = self.device
        maps = device.gradients is not None and ddp.share_host_memory and ddp.shards_parameters
        if device.gradients is not None:
            device = replace(device, inside=device.gradients, collectives={})
        rounds = run.microbatches if ddp.reduces_every_microbatch else 1
        reduce_s = gather_s = 0.0
        for name, calls, grads, params in state.sent:
            shard, _ = shard_and_replica(name, ddp)
            collective = "reduce_scatter" if ddp.sharded else "all_reduce"
            reduce_s += communication_of(groups, shard, collective, calls * rounds, grads * rounds, device).seconds
            if ddp.sharded:
                times = param_gathers(ddp, run.microbatches)
                nbytes = 0 if maps else part_sent(params, groups.size(shard))
                gather_s += communication_of(groups, shard, "all_gather", calls * times, nbytes * times, device).seconds
        copies_s = communication_of(groups, "embd", "all_reduce", 1, state.tied, device).seconds if state.tied else 0.0
        behind = state.update_s + self.device.step_overhead_s * self.device.link_turns + copies_s
        stages = [rows[n] for n in place.numbers]
        last = sum(row.backward_s for row in stages)
        arithmetic = run.microbatches * sum(row.forward_s + row.backward_s - row.exchanges for row in stages)
        return behind + exposed(ddp, self.device, state.buckets, reduce_s, gather_s, last, state.update_s, arithmetic)


def buckets_of(
    numels: Sequence[int], ddp: DistributedDataParallelConfig, data_ranks: int, *, one_bucket: bool
) -> list[int]:
    """Return the elements of each bucket of a buffer, without padding.

    Args:
        numels: Elements of its parameters, in model order.
        ddp: Configuration of the wrapper.
        data_ranks: Size of the data group.
        one_bucket: True if the buffer is one bucket by default.
    """
    size = resolve_bucket_size(
        ddp.bucket_size,
        ddp.num_buckets,
        numel=sum(numels),
        data_ranks=data_ranks,
        overlap=ddp.overlap_grad_reduce,
        one_bucket=one_bucket,
        shards_gradients=ddp.shards_gradients,
    )
    if size is None:
        return [sum(numels)]
    found = [0]
    for numel in reversed(numels):
        if found[-1] and (found[-1] + numel > size if ddp.shards_gradients else found[-1] >= size):
            found.append(0)
        found[-1] += numel
    return found


def joined(costs: Sequence[LayerCosts], figures: Sequence[PartFigures]) -> LayerCosts:
    """Return the costs of a stage with several parts."""
    together = StageFigures.of(figures)
    return LayerCosts(
        together.saved,
        max(together.forward, together.backward),
        sum(cost.forward_s for cost in costs),
        sum(cost.backward_s for cost in costs),
        sum(cost.exchanges for cost in costs),
    )


def places_of(run: Run, parts: Sequence[Sequence[Any]], figures: Mapping[Any, PartFigures]) -> list[Position]:
    """Return the positions of a run's pipeline. `parts` has the parts of each stage."""
    layout, last = run.layout, run.layout.num_stages - 1
    kinds: dict[Any, int] = {}
    found = []
    for position in range(layout.pp):
        numbers = layout.stages_of(position)
        names = tuple(part for number in numbers for part in parts[number])
        params = [param for name in names for param in figures[name].params]
        elements = [sum(numel for name in parts[number] for numel, _ in figures[name].params) for number in numbers]
        ends = {0, last} & set(numbers)
        tied = 0
        if run.source.is_tied and len(ends) == 1 and last > 0:
            embedding = figures[parts[0][0]].params[0]
            tied = embedding[0]
            if 0 not in numbers:
                params.append(embedding)
                elements[-1] += tied
        kind = kinds.setdefault((names, position == 0), len(kinds))
        found.append(Position(numbers, params, tuple(elements), tied, position == 0, kind))
    return found


def activations_of(
    place: Position, rows: Sequence[LayerCosts], order: Order, sent: int
) -> list[tuple[int, tuple[bool, ...]]]:
    """Return the activation bytes of one position at its highest moments.

    Args:
        place: Pipeline position.
        rows: Costs of all stages.
        order: Order of the schedule.
        sent: Bytes that one stage sends the next for a microbatch.

    Returns:
        (bytes, whether backwards of each stage have begun) for each moment.
    """
    last = len(rows) - 1
    kept = {number: rows[number].saved - sent * (number < last) for number in place.numbers}  # sent ones are freed
    highest = max(rows[number].highest - kept[number] for number in place.numbers)
    found = []
    for moment in order.in_flight[place.numbers[0] % len(order.in_flight)]:
        alive = dict(zip(place.numbers, moment.counts, strict=True))
        received = sum(count for number, count in alive.items() if number > 0) + any(n < last for n in place.numbers)
        nbytes = sum(count * kept[number] for number, count in alive.items()) + highest + received * sent
        found.append((nbytes, moment.has_begun))
    return found


@lru_cache(maxsize=4096)
def order_of(schedule: str, layout: PipelineLayout, microbatches: int) -> Order:
    """Summarize a schedule's order. More than four microbatches per rank only repeat the pattern."""
    stages = layout.num_stages
    if stages == 1:
        return Order(((InFlight((1,), (True,)),),), (0.0,), 0.0)
    rank = layout.pp if find_schedule(schedule).name == "Interleaved1F1B" else stages
    count = microbatches if microbatches <= 4 * rank else 2 * rank
    orders = actions_of_ranks(schedule, layout, count)
    more = microbatches - count if find_schedule(schedule).name == "GPipe" else 0  # all forwards come first
    in_flight = []
    for place, actions in enumerate(orders):
        alive = dict.fromkeys(layout.stages_of(place), more)
        done = dict.fromkeys(alive, 0)
        most: dict[tuple[bool, ...], tuple[int, ...]] = {}
        for action in actions:
            alive[action.stage] += action.kind == "F"
            has_begun = tuple(0 < backwards < count for backwards in done.values())
            most[has_begun] = max(most.get(has_begun, ()), tuple(alive.values()), key=sum)
            has_ended = action.kind in ("B", "W")
            alive[action.stage] -= has_ended
            done[action.stage] += has_ended
        in_flight.append(tuple(InFlight(counts, has_begun) for has_begun, counts in most.items()))
    seconds = {(kind, n): 2.0 if kind == "B" else 1.0 for kind in "FBIW" for n in range(stages)}
    small = 1e-3
    spans, later = (pipeline_spans(orders, seconds, hop, stages) for hop in (0.0, small))
    ends = [max(span.end_s for span in spans if span.place == place) for place in range(layout.pp)]
    hops = (max(span.end_s for span in later) - max(ends)) / small * microbatches / count
    return Order(tuple(in_flight), tuple(end - 3.0 * count * layout.chunks for end in ends), hops)

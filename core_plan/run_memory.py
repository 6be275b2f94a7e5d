"""Memory of a run, for one rank of each kind: contents, time of the peak, and the part of the device left free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from core.distributed import DistributedDataParallelConfig
from core.distributed.layout.model_plan import ModelPlan, plan_model
from core.groups.rank_grid import RankGrid
from core.optimizer import OptimizerConfig
from core.pipeline_parallel import PipelineLayout
from core.pipeline_parallel.schedules import arrivals, find_schedule
from core.watch.collector_pause import collector_paused
from core_plan.planned_groups import PlannedGroups, planned_groups
from core_plan.schedule_order import actions_of_ranks
from core_plan.state_bytes import TierBytes, full_gradients, state_bytes
from core_plan.step_figures import PartFigures
from core_plan.step_memory import HighPoint, Saved, StageFigures, memory_along

StageParts = Mapping[int, Sequence[PartFigures]]  # stage -> the figures of its parts, in order


class Source(Protocol):
    """A model to plan."""

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a microbatch."""

    @property
    def config(self) -> Any:
        """The model's configuration, for contracts; None for a model without one."""

    def stages(self, layout: PipelineLayout, groups: PlannedGroups) -> Sequence[nn.Module]:
        """Build the stages of the planned rank on the meta device."""

    def sent_bytes(self) -> int:
        """Return the bytes that one stage sends to the next for a microbatch."""

    def parts_of_stage(self, layout: PipelineLayout, stage: int) -> Sequence[Any]:
        """Return the parts of a stage in order: keys of ``figures``."""

    def name_of_layers(self, kind: Any) -> str:
        """Describe layers of a kind. All other keys of ``figures`` are already text."""

    def figures(
        self, parts: Sequence[Any], groups: PlannedGroups, ddp: DistributedDataParallelConfig
    ) -> Mapping[Any, PartFigures]:
        """Return the costs of each of ``parts`` for one microbatch."""


@dataclass(frozen=True)
class Run:
    """Everything that determines the cost of a run.

    Attributes:
        source: The model.
        grid: The grid of ranks.
        layout: Layout of the pipeline.
        schedule: Name of the pipeline schedule.
        microbatches: Microbatches per rank and step.
        tokens_per_step: Tokens of a step on all ranks.
        ddp: Configuration of the wrapper.
        optimizer: Configuration of the optimizer.
        on_cpu: True for ranks on CPU.
        one_host: True if ranks on CPU are processes of one machine.
        notes: Sentences about settings that the plan does not follow.
    """

    source: Source
    grid: RankGrid
    layout: PipelineLayout
    schedule: str
    microbatches: int
    tokens_per_step: int
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    on_cpu: bool = False
    one_host: bool = True
    notes: Sequence[str] = ()

    @property
    def gradients_wait(self) -> bool:
        """True if full gradients of earlier microbatches wait for the last one, although a rank owns only a shard."""
        shards = not self.ddp.residency.keeps_whole and not self.ddp.reduces_every_microbatch
        return shards and self.microbatches > 1

    def groups_of(self, rank: int) -> PlannedGroups:
        """Return the groups of one rank."""
        return planned_groups(
            self.grid,
            rank,
            num_instances=self.ddp.num_distributed_optimizer_instances,
            embedding_ranks=self.layout.embedding_ranks,
            over_gloo=self.on_cpu,
        )

    def first_ranks(self) -> list[int]:
        """Return the first rank of each pipeline position. All ranks of one position need the same memory."""
        return [place * self.grid.stride("pp") for place in range(self.layout.pp)]


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank: bytes by kind between steps, and at the highest point of each action of a step.

    Attributes:
        rank: The rank.
        stages: Its pipeline stages.
        state: Bytes by kind between steps.
        moments: The highest point of each action.
        plans: The wrapper's plan of each of its chunks.
        files: Offloaded bytes by kind, in files.
        host: Offloaded bytes by kind, in host memory, with a GPU.
        parts: Figures of the parts of its stages.
    """

    rank: int
    stages: tuple[int, ...]
    state: Mapping[str, int]
    moments: Sequence[HighPoint]
    plans: Sequence[ModelPlan] = field(default=(), repr=False)
    files: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)
    parts: StageParts = field(default_factory=dict, repr=False)

    @property
    def highest(self) -> HighPoint:
        """The action with the most bytes."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def held(self) -> dict[str, int]:
        """Bytes by kind at the highest point of a step."""
        return {**self.state, **self.highest.held}

    @property
    def activations(self) -> list[Saved]:
        """The activations at the highest point of a step, by part of the model."""
        return self.highest.saved(self.parts)

    @property
    def peak(self) -> int:
        """Bytes at the highest point of a step."""
        return sum(self.held.values())


def wrapped_plans(run: Run, groups: PlannedGroups) -> list[tuple[nn.Module, ModelPlan]]:
    """Return the chunks of a rank with the wrapper's plan of each."""
    with collector_paused():
        return [
            (stage, plan_model(stage, run.source.config, run.ddp, groups, one_bucket=one, without_memory=True))
            for number, stage in enumerate(run.source.stages(run.layout, groups))
            for one in [number > 0 or groups.rank("pp") > 0]  # as the wrapper decides it
        ]


def parts_of_stages(run: Run, known: dict[Any, PartFigures] | None = None) -> dict[int, list[PartFigures]]:
    """Return the figures of the parts of each pipeline stage. Sent activations are freed when they have arrived.

    ``known`` are figures of some parts for this run's microbatch, which are not measured again. New ones are added.
    """
    parts = {stage: run.source.parts_of_stage(run.layout, stage) for stage in range(run.layout.num_stages)}
    known = {} if known is None else known
    missing = [part for part in dict.fromkeys(part for row in parts.values() for part in row) if part not in known]
    if missing:
        figures = run.source.figures(missing, run.groups_of(0), run.ddp)
        names = {part: part if isinstance(part, str) else run.source.name_of_layers(part) for part in missing}
        known |= {part: replace(figures[part], name=name) for part, name in names.items()}
    found = {stage: [known[part] for part in row] for stage, row in parts.items()}
    for row in list(found.values())[:-1]:
        last = row[-1]
        row[-1] = replace(last, saved=last.saved - last.output, name=f"{last.name}, output sent")
    return found


Wrapped = dict[Any, tuple[list[tuple[nn.Module, ModelPlan]], TierBytes]]  # by what distinguishes pipeline positions


def plan_memory(
    run: Run, ranks: Sequence[int] | None = None, parts: StageParts | None = None, wrapped: Wrapped | None = None
) -> list[RankMemory]:
    """Plan the memory of ranks.

    Args:
        run: The run.
        ranks: Ranks to plan; None is one rank of each pipeline position.
        parts: Result of ``parts_of_stages``; None computes it.
        wrapped: Stages of runs that differ only in microbatches and recomputation. New ones are added.
    """
    ranks = run.first_ranks() if ranks is None else ranks
    orders = actions_of_ranks(run.schedule, run.layout, run.microbatches)
    # Under 1F1B torch waits for a send before the next one.
    kind = find_schedule(run.schedule)
    arrived = None if kind.name == "1F1B" else arrivals(orders)
    parts = parts_of_stages(run) if parts is None else parts
    found = []
    wrapped = {} if wrapped is None else wrapped  # equal positions share an entry
    for rank in ranks:
        groups = run.groups_of(rank)
        place = groups.rank("pp")
        stages = run.layout.stages_of(place)
        last = [groups.rank(name) for name in ("dp_cp", "expt_dp")]  # the last shards may end in padding
        alike = place == 0, *last, *(tuple(run.source.parts_of_stage(run.layout, stage)) for stage in stages)
        if alike not in wrapped:
            chunks = wrapped_plans(run, groups)
            state = state_bytes(
                *(chunks, run.ddp, run.optimizer, groups),
                on_cpu=run.on_cpu,
                one_host=run.one_host,
            )
            wrapped[alike] = chunks, state
        chunks, state = wrapped[alike]
        waiting = [full_gradients(plan) if run.gradients_wait else 0 for _, plan in chunks]
        moments = memory_along(
            orders[place],
            {stage: StageFigures.of(parts[stage], whole) for stage, whole in zip(stages, waiting, strict=True)},
            num_stages=run.layout.num_stages,
            microbatches=run.microbatches,
            sent_bytes=run.source.sent_bytes(),
            arrived=arrived,
            sends={stage for stage in stages if run.layout.sends(stage)},
            returns={stage for stage in stages if stage and run.layout.sends(stage - 1)},
            ahead=int(kind.many_chunks and run.layout.pp > 1),  # torch's tables post the next one
        )
        more: dict[str, Any] = {"files" if run.on_cpu else "host": state.offloaded}
        more["parts"] = {stage: parts[stage] for stage in stages}
        found.append(RankMemory(rank, stages, state.device, moments, [plan for _, plan in chunks], **more))
    return found


def least_activations(run: Run, parts: StageParts) -> int:
    """Return a lower bound of the bytes that a step adds to the state of the first pipeline position.

    The order of a schedule repeats after a few rounds of microbatches, and messages on the way are not counted.
    """
    layout = run.layout
    count = min(run.microbatches, 4 * layout.pp)
    moments = memory_along(
        actions_of_ranks(run.schedule, layout, count)[0],
        {stage: StageFigures.of(parts[stage]) for stage in layout.stages_of(0)},
        num_stages=layout.num_stages,
        microbatches=count,
        sent_bytes=run.source.sent_bytes(),
    )
    return max(moment.total for moment in moments)

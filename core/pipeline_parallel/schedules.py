"""Pipeline schedules, with torch's class for each and its constraints on layout and microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from core.pipeline_parallel.layout import PipelineLayout, Placement


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """Schedule of torch.distributed.pipelining."""

    name: str
    torch_class: str
    placement: Placement
    many_chunks: bool  # True if a rank may have several stages
    splits_backward: bool  # True if it computes weight gradients separately from input gradients
    legal_microbatches: Callable[[int, PipelineLayout], bool]
    rule: str  # legal_microbatches in words


def _any_number(microbatches: int, layout: PipelineLayout) -> bool:
    return True


def _whole_rounds(microbatches: int, layout: PipelineLayout) -> bool:
    return microbatches % max(1, microbatches // layout.pp) == 0


def _one_a_stage(microbatches: int, layout: PipelineLayout) -> bool:
    return microbatches >= layout.num_stages


STAGES = "at least one microbatch a stage is needed"
ROUNDS = "microbatches must divide evenly over max(1, microbatches // pp) rounds"

SCHEDULES = {
    kind.name: kind
    for kind in (
        ScheduleKind("GPipe", "ScheduleGPipe", "loop", False, False, _any_number, ""),
        ScheduleKind("1F1B", "Schedule1F1B", "loop", False, False, _one_a_stage, STAGES),
        ScheduleKind("Interleaved1F1B", "ScheduleInterleaved1F1B", "loop", True, False, _whole_rounds, ROUNDS),
        ScheduleKind(
            "InterleavedZeroBubble", "ScheduleInterleavedZeroBubble", "loop", True, True, _whole_rounds, ROUNDS
        ),
        ScheduleKind("ZBVZeroBubble", "ScheduleZBVZeroBubble", "v", True, True, _any_number, ""),
        ScheduleKind("DualPipeV", "ScheduleDualPipeV", "v", True, True, _one_a_stage, STAGES),
    )
}


def find_schedule(name: str) -> ScheduleKind:
    """Return the schedule with this name, ignoring case. An unknown name raises ValueError with all names."""
    for kind in SCHEDULES.values():
        if kind.name.lower() == name.lower():
            return kind
    raise ValueError(f"schedule is {name!r}; expected one of {', '.join(SCHEDULES)}")


def check_schedule(kind: ScheduleKind, layout: PipelineLayout) -> None:
    """Raise ValueError unless the schedule supports the layout's placement and number of chunks."""
    if layout.pp > 1 and kind.placement != layout.placement:
        raise ValueError(
            f"schedule {kind.name} needs placement {kind.placement!r}, and the layout has {layout.placement!r}; use "
            f"PipelineLayout(..., placement={kind.placement!r})"
        )
    if not kind.many_chunks and layout.chunks > 1:
        raise ValueError(
            f"schedule {kind.name} runs one stage a rank, and the layout has {layout.chunks} ({layout.num_stages} "
            f"stages on {layout.pp} ranks); use {layout.pp} stages, or Interleaved1F1B or InterleavedZeroBubble"
        )


def check_microbatches(kind: ScheduleKind, layout: PipelineLayout, microbatches: int) -> None:
    """Raise ValueError, with the nearest valid numbers, unless the schedule supports this number of microbatches."""
    if microbatches >= 1 and kind.legal_microbatches(microbatches, layout):
        return
    below = next((n for n in range(microbatches - 1, 0, -1) if kind.legal_microbatches(n, layout)), None)
    above = next(n for n in range(max(microbatches + 1, 1), 10**9) if kind.legal_microbatches(n, layout))
    nearest = f"{above}" if below is None else f"{below} or {above}"
    rule = kind.rule if microbatches >= 1 else "at least one microbatch is needed"
    raise ValueError(
        f"{microbatches} microbatches do not fit schedule {kind.name} with {layout.num_stages} stages on {layout.pp} "
        f"ranks: {rule}. Nearest: {nearest}"
    )


def plan_pipeline(
    num_layers: int,
    pp: int,
    *,
    schedule: str = "1F1B",
    chunks: int | None = None,
    microbatches: int | None = None,
    layers_per_stage: tuple[int, ...] | None = None,
    count_embedding: bool = False,
    count_head: bool = False,
) -> PipelineLayout:
    """Create and check a model's pipeline layout under a schedule, before any group exists.

        layout = plan_pipeline(24, pp=4, schedule="Interleaved1F1B", chunks=3, microbatches=8)

    Args:
        num_layers: Layers of the full model.
        pp: Number of pipeline ranks.
        schedule: A name from SCHEDULES.
        chunks: Stages per rank. Defaults to the number in ``layers_per_stage``, else 2 for a V-shaped schedule, else 1.
        microbatches: Microbatches per step, to check them too.
        layers_per_stage: Layers of each stage. Defaults to an even layout.
        count_embedding: Count the embeddings as one layer.
        count_head: Count the head as one layer.

    Raises:
        ValueError: If the arguments contradict each other or the schedule.
    """
    kind = find_schedule(schedule)
    if layers_per_stage is not None:
        if count_embedding or count_head:
            raise ValueError("layers_per_stage says it all; leave out count_embedding and count_head")
        layout = PipelineLayout(tuple(layers_per_stage), pp, kind.placement)
        layout.check_model(num_layers)
        if chunks is not None and chunks != layout.chunks:
            raise ValueError(
                f"layers_per_stage names {layout.num_stages} stages, {layout.chunks} on each of {pp} ranks, and chunks "
                f"is {chunks}; name {pp * chunks} stages or leave chunks out"
            )
    else:
        wanted = chunks if chunks is not None else 2 if kind.placement == "v" else 1
        layout = PipelineLayout.even(
            num_layers, pp, wanted, kind.placement, count_embedding=count_embedding, count_head=count_head
        )
    check_schedule(kind, layout)
    if microbatches is not None:
        check_microbatches(kind, layout, microbatches)
    return layout


def build_schedule(kind: ScheduleKind, stages: list[Any], microbatches: int) -> Any:
    """Create torch's schedule over this rank's stages. The last stage's output is its loss, already scaled.

    Raises RuntimeError if this version of torch lacks the schedule.
    """
    from torch.distributed import pipelining

    schedule_class = getattr(pipelining, kind.torch_class, None) or getattr(
        pipelining.schedules, kind.torch_class, None
    )
    if schedule_class is None:
        raise RuntimeError(f"this version of torch has no {kind.torch_class}; choose another schedule or upgrade torch")
    # scale_grads would divide .grad while buckets are in flight; the loss carries the factor instead.
    return schedule_class(
        stages if kind.many_chunks else stages[0], microbatches, loss_fn=lambda output, _: output, scale_grads=False
    )


class Action(NamedTuple):
    """A rank's computation for one microbatch: forward, backward, input gradient or weight gradient.

    The last two occur only if the schedule splits the backward.
    """

    kind: Literal["F", "B", "I", "W"]
    stage: int
    microbatch: int


def actions_of(schedule: Any) -> dict[int, list[Action]] | None:
    """Return each rank's ordered actions in torch's schedule, or ``None`` if torch has no table for it.

    Without a table, the schedule waits for each send.
    """
    if not hasattr(schedule, "pipeline_order_with_comms"):
        return None
    return {rank: actions_in(row) for rank, row in schedule.pipeline_order.items()}


def actions_in(row: Iterable[Any]) -> list[Action]:
    """Return the computations in one rank's row of torch's schedule table."""
    parts = (part for action in row if action is not None for part in action.sub_actions or (action,))
    found = ((str(part.computation_type.value), part.stage_index, part.microbatch_index) for part in parts)
    return [Action(kind, stage, number) for kind, stage, number in found if kind in ("F", "B", "I", "W")]  # type: ignore[arg-type]


class Arrivals(NamedTuple):
    """Messages that a stage must have consumed when it receives another one, by (stage, microbatch).

    Attributes:
        outputs: Number of the stage's activations consumed when the gradient of this microbatch arrives.
        gradients: For activations of this microbatch, the sending rank and the number of gradients it had consumed
            before.
        place: For each gradient that a stage sends, the consuming rank and the gradient's index on that rank.
    """

    outputs: dict[tuple[int, int], int]
    gradients: dict[tuple[int, int], tuple[int, int]]
    place: dict[tuple[int, int], tuple[int, int]]

    def used(self, gradient: tuple[int, int], received: tuple[int, int]) -> bool:
        """Return ``True`` if a gradient has been consumed when activations are received. Both are (stage,
        microbatch).
        """
        (user, number), (sender, count) = self.place[gradient], self.gradients[received]
        return user == sender and number < count


def passed(sent: tuple[int, int], received: tuple[int, int]) -> bool:
    """Return ``True`` if sent activations have been consumed when activations reach a later stage of the same rank.

    Both are (stage, microbatch). A microbatch that arrives has been through all stages before.
    """
    return sent[0] < received[0] and sent[1] == received[1]


def arrivals(rows: Iterable[Sequence[Action]]) -> Arrivals:
    """Derive from all ranks' rows the order in which neighboring stages consume each other's messages."""
    found = Arrivals({}, {}, {})
    for rank, row in enumerate(rows):
        forwards: Counter[int] = Counter()
        backwards = 0
        for kind, stage, microbatch in row:
            if kind == "F":
                forwards[stage] += 1
                found.gradients[stage + 1, microbatch] = rank, backwards
            elif kind in ("B", "I"):
                found.place[stage + 1, microbatch] = rank, backwards
                backwards += 1
                found.outputs[stage - 1, microbatch] = forwards[stage]
    return found

"""PipelineLayout: assignment of layers to stages and of stages to ranks. Pure arithmetic, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from core.number_ranges import either, nearest_multiples

if TYPE_CHECKING:
    from core.groups.process_groups import ProcessGroups

Placement = Literal["loop", "v"]


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Layers of one stage.

    Attributes:
        index: Index of the stage.
        layer_numbers: Layer indices in the full model.
        pre_process: True if the stage has the embeddings.
        post_process: True if the stage has the output layer.
    """

    index: int
    layer_numbers: range
    pre_process: bool
    post_process: bool


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Assignment of a model's layers to pipeline stages, and of stages to pipeline ranks.

        PipelineLayout.even(24, pp=4)            # 6 layers on each of 4 ranks
        PipelineLayout((5, 7, 7, 5), pp=4)       # uneven: room for embeddings and head
        PipelineLayout.even(24, pp=4, chunks=3)  # 12 stages of 2 layers, virtual chunks

    Args:
        layers_per_stage: Number of layers of each stage, in model order. The first stage also has the embeddings, and
            the last one the final norm, the head and the loss. 0 means that a stage has nothing else.
        pp: Number of pipeline ranks. Each has the same number of stages, its chunks.
        placement: 'loop' assigns stage s to rank s mod pp. 'v' has two chunks per rank and reverses at the last rank,
            so that rank 0 has the first and the last stage.

    Raises:
        ValueError: If the numbers do not form a pipeline. The message has the arithmetic.
    """

    layers_per_stage: tuple[int, ...]
    pp: int
    placement: Placement = "loop"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))
        counts = self.layers_per_stage
        if self.pp < 1:
            raise ValueError(f"a pipeline needs at least one rank, got pp {self.pp}")
        if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
            raise ValueError(f"layers_per_stage is {list(counts)}; expected integers of at least 0")
        if not counts or len(counts) % self.pp:
            raise ValueError(
                f"layers_per_stage {list(counts)} names {len(counts)} stages, which {self.pp} ranks cannot share "
                f"evenly ({len(counts)} / {self.pp} = {len(counts) / self.pp:g}); name "
                f"{either(nearest_multiples(len(counts), self.pp))} stages"
            )
        if self.placement not in ("loop", "v"):
            raise ValueError(f"placement is {self.placement!r}; expected 'loop' or 'v'")
        if self.placement == "v" and self.chunks != 2:
            raise ValueError(
                f"placement 'v' has 2 stages a rank, so {2 * self.pp} on {self.pp} ranks; layers_per_stage names "
                f"{len(counts)}"
            )

    @classmethod
    def even(
        cls,
        num_layers: int,
        pp: int,
        chunks: int = 1,
        placement: Placement = "loop",
        *,
        count_embedding: bool = False,
        count_head: bool = False,
    ) -> PipelineLayout:
        """Create a layout with the same number of layers on every stage.

        Args:
            num_layers (int): Layers of the full model.
            pp (int): Number of pipeline ranks.
            chunks (int, optional): Stages per rank.
            placement (Placement, optional): 'loop' or 'v'.
            count_embedding (bool, optional): Count the embeddings as one layer.
            count_head (bool, optional): Count the head as one layer.

        Raises:
            ValueError: If the layers do not divide. The message has the nearest valid numbers of layers and ranks.
        """
        if pp < 1 or chunks < 1:
            raise ValueError(f"pp and chunks must be at least 1, got pp {pp} and chunks {chunks}")
        stages, extra = pp * chunks, count_embedding + count_head
        each, rest = divmod(num_layers + extra, stages)
        if rest or num_layers < 1:
            fitting = [count - extra for count in nearest_multiples(num_layers + extra, stages) if count > extra]
            sizes = [size for size in range(1, num_layers + 1) if (num_layers + extra) % (size * chunks) == 0]
            near = [*[size for size in sizes if size < pp][-1:], *[size for size in sizes if size > pp][:1]]
            counted = f" + {extra} for embedding and head" if extra else ""
            others = f", or pp {' or '.join(map(str, near))}" if near else ""
            raise ValueError(
                f"{num_layers} layers{counted} do not divide over {stages} stages (pp {pp} x {chunks} chunks): "
                f"{num_layers + extra} / {stages} = {(num_layers + extra) / stages:g}. Use {either(fitting)} "
                f"layers{others}; or say how many each stage gets, layers_per_stage="
                f"{list(spread(num_layers, stages))}"
            )
        counts = [each] * stages
        counts[0] -= count_embedding
        counts[-1] -= count_head
        if min(counts) < 0:
            raise ValueError(
                f"{num_layers} layers over {stages} stages leave {min(counts)} for a stage that also counts embedding "
                "and head; use fewer stages"
            )
        return cls(tuple(counts), pp, placement)

    @classmethod
    def with_ends(
        cls, num_layers: int, pp: int, chunks: int = 1, *, first: int | None = None, last: int | None = None
    ) -> PipelineLayout:
        """Create a layout with given numbers of layers on the first and last rank.

        The other ranks share the remaining layers evenly, and each rank's layers are spread evenly over its chunks.

        Args:
            num_layers (int): Layers of the full model.
            pp (int): Number of pipeline ranks.
            chunks (int, optional): Stages per rank.
            first (int, optional): Layers of the first rank.
            last (int, optional): Layers of the last rank.

        Raises:
            ValueError: If the numbers do not add up.
        """
        middle = pp - (first is not None) - (last is not None)
        each = (num_layers - (first or 0) - (last or 0)) // (middle or 1)
        per_rank = [each if first is None else first, *[each] * (pp - 2), each if last is None else last][:pp]
        layout = cls(tuple(count // chunks for count in per_rank) * chunks, pp)
        layout.check_model(num_layers)
        return layout

    @property
    def num_layers(self) -> int:
        """Number of layers in the full model."""
        return sum(self.layers_per_stage)

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.layers_per_stage)

    @property
    def chunks(self) -> int:
        """Number of stages per rank."""
        return self.num_stages // self.pp

    @property
    def last_rank(self) -> int:
        """Pipeline rank of the last stage, which computes the loss."""
        return self.rank_of(self.num_stages - 1)

    @property
    def ends_share_a_rank(self) -> bool:
        """True if one rank has both the first and the last of several stages; a tied weight then needs no copy."""
        return self.num_stages > 1 and self.last_rank == 0

    def stage(self, index: int) -> StageSpec:
        """Return the layers of stage ``index``, and whether it has the model's ends."""
        first = sum(self.layers_per_stage[:index])
        layers = range(first, first + self.layers_per_stage[index])
        return StageSpec(index, layers, index == 0, index == self.num_stages - 1)

    def sends(self, stage: int) -> bool:
        """True if a stage sends its output to another rank."""
        return stage + 1 < self.num_stages and self.rank_of(stage + 1) != self.rank_of(stage)

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank of a stage."""
        if self.placement == "v" and stage >= self.pp:
            return 2 * self.pp - 1 - stage
        return stage % self.pp

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of one rank, in model order: chunk 0, chunk 1, ..."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def embedding_ranks(self, pipeline_ranks: Sequence[int]) -> list[int]:
        """Return the global ranks with a copy of a tied embedding, given the ranks of a pipeline group.

        Pass it to ``initialize_model_parallel(..., get_embedding_ranks=layout.embedding_ranks)``.
        """
        return [pipeline_ranks[rank] for rank in sorted({0, self.last_rank})]

    def check_model(self, num_layers: int) -> None:
        """Raise ValueError unless the layout has exactly the model's layers."""
        if self.num_layers != num_layers:
            raise ValueError(
                f"layers_per_stage {list(self.layers_per_stage)} places {self.num_layers} layers, and the model has "
                f"{num_layers}; for example {list(spread(num_layers, self.num_stages))}"
            )

    def check_ranks(self, groups: ProcessGroups) -> None:
        """Raise ValueError unless the layout and the pipeline group have equally many ranks."""
        if groups.size("pp") != self.pp:
            ranks = "" if groups.pp is None else f" {groups.ranks('pp')}"
            raise ValueError(
                f"the layout is for {self.pp} pipeline ranks and group 'pp'{ranks} has {groups.size('pp')}; give "
                f"initialize_model_parallel pipeline_model_parallel_size={self.pp}"
            )

    def describe(self) -> str:
        """Describe the layout, one line per rank."""
        lines = []
        for rank in range(self.pp):
            parts = []
            for spec in map(self.stage, self.stages_of(rank)):
                numbers = spec.layer_numbers
                layers = f"layers {numbers[0]}-{numbers[-1]}" if numbers else "no layers"
                ends = ["embeddings"] * spec.pre_process + [layers] + ["head, loss"] * spec.post_process
                parts.append(f"stage {spec.index} ({', '.join(ends)})")
            lines.append(f"rank {rank}: {'; '.join(parts)}")
        return "\n".join(lines)


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Spread layers evenly over stages, with the larger stages in the middle, away from embeddings and head."""
    each, rest = divmod(layers, stages)
    first = (stages - rest) // 2
    return tuple(each + (first <= stage < first + rest) for stage in range(stages))

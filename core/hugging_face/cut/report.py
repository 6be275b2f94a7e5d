"""Options of a split on one rank, and the report that a split model carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.hugging_face.read.plan import Plan
from core.hugging_face.run.sequence import OVER_CONTEXT
from core.pipeline_parallel.layout import PipelineLayout

REPORT = "split_report"  # attribute of a split model that holds its SplitReport


@dataclass(frozen=True)
class SplitReport:
    """Report of a split.

    Attributes:
        partial: Unsplit parameters whose gradients are summed over tp, as the example's forward showed.
        unseen: Trainable parameters that the example did not reach. They are assumed to be unsplit with complete
            gradients.
        unreached: Token counts in the config (windows, chunks, floors) that the example does not exceed.
    """

    plan: Plan
    tp: int
    partial: frozenset[str]
    unseen: frozenset[str]
    unreached: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        found = {"gradients summed over tp": self.partial, "not reached by the example": self.unseen}
        lines = [f"{what}: {', '.join(sorted(names))}" for what, names in found.items() if names]
        lines += [f"the example is no longer than {name} ({number})" for name, number in self.unreached.items()]
        return "\n".join([self.plan.table(self.tp), *lines])


@dataclass(frozen=True)
class Splitting:
    """Options of a split on this rank.

    Attributes:
        layout: Pipeline layout; None without stages.
        parallel_output: As in ``split_model``.
        sequence_parallel: As in ``split_model``.
        vocabulary_multiple: Each rank's rows of a split vocabulary are padded to a multiple of this.
    """

    groups: ProcessGroups
    layout: PipelineLayout | None = None
    parallel_output: bool | Literal["where possible"] = False
    sequence_parallel: str | None = None
    vocabulary_multiple: int = 1

    @property
    def ranks(self) -> agree.Groups:
        """Return the groups over which a split is collective, or ``None`` (all ranks) with stages."""
        if self.layout is not None:
            return None
        axes = ["tp", "ep", *(["cp"] if self.sequence_parallel in OVER_CONTEXT else [])]
        return [self.groups.require(axis) for axis in axes if self.groups.size(axis) > 1]

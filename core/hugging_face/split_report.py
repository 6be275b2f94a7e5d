"""Options of a split on one rank, and the report that a split model carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.hugging_face.plan import Plan
from core.hugging_face.sequence import OVER_CONTEXT
from core.pipeline_parallel.layout import PipelineLayout

REPORT = "split_report"  # the attribute of a split model that says how it was split


@dataclass(frozen=True)
class SplitReport:
    """Report of a split. partial: whole parameters whose gradients are summed over tp, by what the forward showed.

    unseen: parameters that learn and that the example did not reach; they are taken to be whole with whole gradients.
    unreached: what the configuration counts in tokens (windows, chunks, floors) and the example was too short to show.
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
    """Options of splitting on this rank: groups, stages, and outputs (`split_model`)."""

    groups: ProcessGroups
    layout: PipelineLayout | None = None
    parallel_output: bool | Literal["where possible"] = False
    sequence_parallel: str | None = None
    vocabulary_multiple: int = 1

    @property
    def ranks(self) -> agree.Groups:
        """The groups over which a call is collective. With stages these are all ranks."""
        if self.layout is not None:
            return None
        axes = ["tp", "ep", *(["cp"] if self.sequence_parallel in OVER_CONTEXT else [])]
        return [self.groups.require(axis) for axis in axes if self.groups.size(axis) > 1]

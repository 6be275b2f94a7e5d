"""All ranks of a group must hold the same model. They compare it when it is wrapped, before any other collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist

from core import agree
from core.distributed.layout.model_plan import ModelPlan
from core.process_groups import ProcessGroups
from core.rank_grid import COPY_AXES, DATA_KINDS


def check_same_model(
    plan: ModelPlan | None, options: Sequence[str], groups: ProcessGroups, failure: Exception | None
) -> None:
    """Raise LayoutMismatch on every rank where a rank has another model, other options, or no plan.

    failure: why this rank has no plan. It is raised here after the other ranks know of it. Collective over the data
    groups and the tensor-parallel groups.
    """

    def fingerprints() -> Iterator[tuple[str, dist.ProcessGroup, list[str]]]:
        for name in (*DATA_KINDS, *COPY_AXES):
            if groups.size(name) > 1:
                told = [] if plan is None else [*options, *plan.fingerprint(name)]
                yield f"group {name!r}", groups.control(name), told

    agree.same(fingerprints(), failure)

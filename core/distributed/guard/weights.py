"""Comparison of weight copies at times when they must be equal: between an optimizer's steps.

Within a step a program may change each rank's copies differently, as sharpness-aware minimization and per-rank noise
do. So checksums are computed after an optimizer's step, or when the next step begins, and `finalize_model_grads`
compares them. Weights differ only if they also differ there. Our optimizer compares before it writes, because a gather
would mix different weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch

from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.guard.finite import Finding
from core.distributed.guard.replicas import (
    Describe,
    checksum,
    copies_across_stages,
    copies_of_stage,
    refuse_unequal,
    unequal_across_stages,
    unequal_within_stage,
)
from core.distributed.layout.model_plan import ModelPlan
from core.distributed.wire.packs import flat_of, packs_of
from core.groups import agree
from core.groups.process_groups import ProcessGroups, world_groups

WATCHED = 2  # number of first steps after which weights are compared


class Parameters(Protocol):
    """Interface of parameters for WeightWatch."""

    def own_part_of(self, param: torch.nn.Parameter) -> tuple[int, torch.Tensor] | None: ...
    def reading(self) -> AbstractContextManager[None]: ...


class WeightWatch:
    """Weights of one wrapped chunk, and the steps after which they are compared.

    Args:
        plan: The chunk's plan.
        groups: Process groups of the model.
        params: Parameters of the chunk.
        ddp_config: Config of the wrapper.
    """

    def __init__(
        self, plan: ModelPlan, groups: ProcessGroups, params: Parameters, ddp_config: DistributedDataParallelConfig
    ) -> None:
        self.plan, self.groups, self.params = plan, groups, params
        self.compares = ddp_config.initial_weights != "ignore"
        self.warns = ddp_config.first_steps == "warn"
        self.interval = ddp_config.check_weights_interval
        self.left = WATCHED if ddp_config.first_steps != "ignore" else 0
        self.is_due = False  # the same on all ranks
        self.sums: dict[str, list[torch.Tensor]] | None = None  # checksums by group, since the last optimizer's step

    def note(self, *, again: bool = False) -> None:
        """Compute the checksums if they are due. Local; does not wait for the device.

        Args:
            again: Replace checksums that were already computed.
        """
        if self.is_due and (again or self.sums is None):
            self.sums = self._sums()

    def _sums(self) -> dict[str, list[torch.Tensor]]:
        is_sharded = any(self.params.own_part_of(param) is not None for param in self.plan.named.values())
        across = {} if is_sharded else copies_across_stages(self.plan, self.groups)
        with torch.inference_mode():  # autograd does not track the views
            return {
                name: [checksum(flat_of(pack)) for pack in packs_of(held.values())]
                for name, held in (*self.copies().items(), *across.items())
            }

    def copies(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the weights that ranks of this stage hold copies of, by group.

        Frozen parameters that are sharded are left out, because nothing writes them.
        """
        parts = ((name, self.params.own_part_of(param)) for name, param in self.plan.named.items())
        shards = {n: part[1][:0] if n in self.plan.frozen else part[1] for n, part in parts if part is not None}
        return copies_of_stage(self.plan, self.groups, shards)

    def moved(self) -> bool:
        """Return True if copies differed when the checksums were computed. Collective over the groups of copies."""
        sums, self.sums = self.sums or self._sums(), None
        what = "the weights after the last step"
        equal = [agree.equal([s.tolist() for s in of], self.groups.control(name), what) for name, of in sums.items()]
        return not all(equal)

    def next_is_due(self, step: int, *, counts: bool) -> None:
        """Decide if weights are compared after this step.

        Args:
            step: Number of the step.
            counts: False if the step is not one of the first steps.
        """
        self.is_due = (counts and self.left > 0) or (self.interval > 0 and (step + 1) % self.interval == 0)
        self.left -= counts and self.left > 0


def compare_weights(watches: Sequence[WeightWatch], step: int, describe: Describe, *, at_once: bool = False) -> None:
    """Compare the copies of one model's weights, if that is due. Collective: every rank of the job must call it.

    Args:
        watches: Watches of the model's chunks on this rank.
        step: Number of the step.
        describe: Returns lines about this rank's optimizers.
        at_once: Compare the current values, before an optimizer writes them.

    Raises:
        LayoutMismatch: On all ranks, if copies differed from the start.
        ReplicaDriftError: On all ranks, if copies have become different in training.
    """
    first, groups = watches[0], watches[0].groups
    if not first.compares or not (first.is_due or step == 1):
        return
    findings: list[Finding | None] = []
    is_due = first.is_due
    if is_due and not at_once:
        moved = [watch.moved() for watch in watches]
        is_due = agree.any(any(moved), world_groups(groups), "the weights after the last step")
    if is_due:
        findings += [unequal_within_stage(watch.copies(), groups) for watch in watches]
    if is_due or (step == 1 and not at_once):  # stages meet in the first step for the first time
        with torch.no_grad(), ExitStack() as stack:  # nothing is saved for a backward, so chunks may be read together
            for watch in watches:
                stack.enter_context(watch.params.reading())
            findings.append(unequal_across_stages([copies_across_stages(w.plan, groups) for w in watches], groups))
    for watch in watches:
        watch.is_due = False
    finding = next((found for found in findings if found is not None), None)
    warns = first.warns and step <= WATCHED + 1
    refuse_unequal(finding, groups, step=step, warns=warns, describe=describe)

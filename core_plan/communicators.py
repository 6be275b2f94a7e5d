"""Communicators that a rank uses in a step, and their memory according to a device file."""

from __future__ import annotations

from collections.abc import Sequence

from core.distributed.layout.model_plan import ModelPlan, shard_and_replica
from core.groups.rank_grid import GRADIENT_KINDS
from core_plan.planned_groups import PlannedGroups
from core_plan.run_memory import RankMemory, Run, StageParts


def communicators(run: Run, memory: RankMemory, parts: StageParts) -> list[tuple[str, int]]:
    """List the communicators with several ranks that this rank uses.

    Groups with equal ranks share a communicator; gradients have their own: Note [Gradient groups] in
    core/groups/process_groups.py. Sharded parameters gathered by collectives have one more. A backend creates a
    communicator when it is first used.

    Returns:
        (groups that share it, number of ranks) for each communicator.
    """
    groups = run.groups_of(memory.rank)
    names = [name for stage in memory.stages for part in parts[stage] for row in part.sent.values() for name, _ in row]
    names += ["pp"]
    for plan in memory.plans:
        names += _of_gradients(run, plan)
    found: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name in dict.fromkeys(names):
        if groups.size(name) > 1:
            found.setdefault((tuple(groups.ranks(name)), name in GRADIENT_KINDS), []).append(name)
    lanes = [] if run.on_cpu and run.one_host and run.ddp.share_host_memory else _lanes(run, memory.plans, groups)
    return [("/".join(kinds), len(ranks)) for (ranks, _), kinds in found.items()] + lanes


def _of_gradients(run: Run, plan: ModelPlan) -> list[str]:
    names = [
        name
        for layout in plan.layout.buffers
        for name in shard_and_replica(layout.key.data_group, run.ddp)
        if name is not None
    ]
    for contract in plan.contracts.values():
        names += [*contract.partial_over, *contract.averaged_over, *["embd"] * contract.crosses_stages]
    return names


def _lanes(run: Run, plans: Sequence[ModelPlan], groups: PlannedGroups) -> list[tuple[str, int]]:
    """Return the communicators for all-gathers of sharded parameters."""
    if not run.ddp.shards_parameters:
        return []
    keys = [layout.key for plan in plans for layout in (*plan.layout.buffers, *plan.frozen_layout.buffers)]
    shards = dict.fromkeys(shard_and_replica(key.data_group, run.ddp)[0] for key in keys)
    return [(f"gathers over {name}", groups.size(name)) for name in shards if groups.size(name) > 1]


def in_words(found: Sequence[tuple[str, int]], *, on_cpu: bool) -> str:
    """Return a sentence that these communicators are not counted; empty if there are no communicators."""
    if not found:
        return ""
    each = ", ".join(f"{names} of {ranks} ranks" for names, ranks in found)
    whose = "gloo's" if on_cpu else "NCCL's"
    return (
        f"not counted: {whose} memory of {len(found)} communicator{'s' * (len(found) > 1)} ({each}); a device file of "
        "calibrate has it"
    )

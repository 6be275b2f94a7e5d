"""Comparison of weight copies, which must be the same on all ranks. Buffers of modules are not compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.guard.finite import Finding, ReplicaDriftError
from core.distributed.layout.model_plan import ModelPlan
from core.distributed.wire.packs import flat_of, packs_of
from core.groups import agree
from core.groups.agree import LayoutMismatch
from core.groups.global_names import namer, without_transparent
from core.groups.process_groups import ProcessGroups, control_of_stage, world_groups
from core.groups.rank_grid import COPY_AXES, DATA_KINDS, STAGE_CROSSING
from core.watch.warn_user import warn_user

Describe = Callable[[], list[str]]  # returns lines about this rank
DATA, WITHIN_STAGE, ACROSS_STAGES = range(3)  # which copies differ
AFTER_INPUTS = 1  # the order of a finding
REMEDIES = {
    DATA: "Seed all data ranks alike, load the same checkpoint, or wrap with initial_weights='broadcast'",
    WITHIN_STAGE: "Each of these ranks holds a copy: draw it from a seed that they share (the model-parallel seed is "
    "for split parameters only), load the same checkpoint, or wrap with initial_weights='broadcast'. If each holds "
    "another slice, set tensor_model_parallel = True on the parameter",
    ACROSS_STAGES: "Stages hold copies of one weight: draw them from one seed or load the same checkpoint before the "
    "first step; initial_weights='broadcast' does not reach across stages",
}
AFTER_THE_WRAP = (
    "Some ranks have initialised, loaded or written them since. Do it before the wrap, or on all ranks alike."
)
RESTART = "Otherwise restart from a checkpoint that was saved before, and look for a lost message or damaged memory"
# Causes of unequal weights in training, likeliest first.
STEPS = (
    "a rank left out an optimizer's step, clipped alone, or stepped with another learning rate, decay or seed; or "
    "weights were initialised or loaded again on some ranks. " + RESTART
)
CLIPS = (
    "torch.nn.utils.clip_grad_norm_, which clips by the norm of one rank's part of the model; clip by "
    "OptimizerConfig(clip_grad=...) or optimizer.clip_grad_norm, which count every gradient once. Else: " + STEPS
)


def first_unequal(
    named: Iterable[tuple[str, Sequence[torch.Tensor]]], group: dist.ProcessGroup, group_name: str
) -> str | None:
    """Return a text about the first parameter whose copies differ between ranks of a group. Collective over `group`.

    Only a hash is sent. The checksums of single parameters are sent only if hashes differ.

    Args:
        named: (name, copies on this rank), in one order on all ranks. Names may differ between stages.
        group: Control group of the ranks.
        group_name: Its name, for the text.

    Returns:
        The text, or None if all copies are equal.
    """
    named, rank, what = list(named), dist.get_rank(), f"the weights of group {group_name}"
    with torch.inference_mode():  # autograd keeps no account of the views
        sums = [checksum(flat_of(pack)).tolist() for pack in packs_of(copies[0] for _, copies in named)]
    several = [_sums(copies, rank) for _, copies in named if len(copies) > 1]
    if agree.equal((sums, several), group, what):
        return None
    everyone = agree.gather([(name, _sums(copies, rank)) for name, copies in named], group, what)
    ranks = list(everyone)
    for held in itertools.zip_longest(*everyone.values(), fillvalue=("nothing", ())):
        name, expected = held[0]
        others = {rank: other for rank, (other, found) in zip(ranks, held, strict=True) if found != expected}
        if others:
            there = next(iter(others.values()))
            return (
                f"parameter {name!r} has other values on ranks {list(others)}"
                f"{'' if there == name else f' (there it is {there!r})'} than on rank {ranks[0]} of group "
                f"{group_name!r} {ranks}"
            )
    return (
        f"weights have other values on some of the ranks {ranks} of group {group_name!r}. Which parameter differs "
        "cannot be said: the checksums of each are equal, those of many together are not"
    )


def _sums(copies: Sequence[torch.Tensor], rank: int) -> tuple[object, ...]:
    """Return the checksum of equal copies. If a rank's copies differ, its result differs from every other rank's."""
    sums = {tuple(checksum(copy).tolist()) for copy in copies}
    return sums.pop() if len(sums) == 1 else (rank, *sorted(sums))


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return three int64 sums [3] over the bits of a tensor: plain, weighted by column and by row of a table 61 wide.

    Equal for equal tensors. One changed element, or two exchanged ones, change at least one of the sums. They are on
    the tensor's device, and the host does not wait for them.

    Args:
        tensor: Any dense tensor.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return torch.zeros(3, dtype=torch.int64, device=flat.device)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64)
    bits = flat.view(torch.uint8).view(integers)  # torch adds neither unsigned integers nor bits
    width = 61
    body, tail = bits[: bits.numel() // width * width].view(-1, width), bits[bits.numel() // width * width :]
    columns = body.sum(dim=0, dtype=torch.int64)
    columns[: tail.numel()] += tail
    rows = torch.cat([body.sum(dim=1, dtype=torch.int64), tail.sum(dtype=torch.int64).reshape(1)])
    numbers = torch.arange(1, max(width, rows.numel()) + 1, device=flat.device)
    by_column, by_row = columns * numbers[:width], rows * numbers[: rows.numel()]
    return torch.stack([columns.sum(), by_column.sum(), by_row.sum()])


def within_stage(plan: ModelPlan, groups: ProcessGroups) -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
    """Yield each group within the stage with the parameters that all its ranks hold copies of.

    The order of groups is the same on all ranks.

    Args:
        plan: The model's plan.
        groups: Process groups of the model.
    """
    others = (rule.group for rule in plan.rules if rule.group not in STAGE_CROSSING)
    for name in dict.fromkeys((*DATA_KINDS, *COPY_AXES, *others)):
        if groups.size(name) > 1:
            yield name, plan.of_group(name) if name in DATA_KINDS else plan.copies_over(name)


def copies_of_stage(
    plan: ModelPlan, groups: ProcessGroups, shards: Mapping[str, torch.Tensor] | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights that ranks of each group hold copies of.

    Data ranks hold no copies of shards, but the ranks of other optimizer instances do.

    Args:
        plan: The model's plan.
        groups: Process groups of the model.
        shards: This rank's shards of sharded parameters, by name.

    Returns:
        Weights by group and name; for sharded parameters this rank's shard.
    """
    shards = shards or {}
    held_over = dict(within_stage(plan, groups))
    instances = {f"inter_{name}": name for name in DATA_KINDS if shards and groups.size(f"inter_{name}") > 1}
    held_over |= {name: plan.of_group(kind) for name, kind in instances.items()}
    return {
        name: {k: shards.get(k, param) for k, param in held.items() if k not in shards or name not in DATA_KINDS}
        for name, held in held_over.items()
    }


def unequal_within_stage(copies: Mapping[str, Mapping[str, torch.Tensor]], groups: ProcessGroups) -> Finding | None:
    """Find the first weight of a model chunk whose copies within its stage differ. Collective over their groups.

    Args:
        copies: From `copies_of_stage`; a weight may be replaced by its checksum.
        groups: Process groups of the model.
    """
    finding: Finding | None = None
    for name, held in copies.items():
        found = first_unequal(((key, [tensor]) for key, tensor in held.items()), groups.control(name), name)
        # Raised after the loop: ranks of another group may not know of it, and wait in the next comparison.
        if found is not None and finding is None:
            is_data = name.removeprefix("inter_") in DATA_KINDS
            finding = DATA if is_data else WITHIN_STAGE, dist.get_rank(), found
    return finding


def copies_across_stages(plan: ModelPlan, groups: ProcessGroups) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights of a chunk that other pipeline stages hold copies of, by group and name.

    Args:
        plan: The chunk's plan.
        groups: Process groups of the model.
    """
    names = (*sorted(STAGE_CROSSING - {"pp"}), "pp")  # as in check_stages
    return {name: dict(plan.copies_over(name)) for name in names if groups.size(name) > 1}


def unequal_across_stages(
    chunks: Sequence[Mapping[str, Mapping[str, torch.Tensor]]], groups: ProcessGroups
) -> Finding | None:
    """Find the first weight whose copies on several pipeline stages differ. Collective over groups across stages.

    Args:
        chunks: From `copies_across_stages`, for one model's chunks on this rank, in the model's order. Equal names in
            several chunks mean one weight. Sharded ones must be read unsharded, because stages shard them differently.
        groups: Process groups of the model.
    """
    finding: Finding | None = None
    for name in chunks[0]:
        held: dict[str, list[torch.Tensor]] = {}
        for copies in chunks:
            for key, tensor in copies[name].items():
                held.setdefault(key, []).append(tensor)
        found = first_unequal(held.items(), groups.control(name), name)
        if found is not None and finding is None:
            finding = ACROSS_STAGES, dist.get_rank(), found
    return finding


def held_twice(chunks: Sequence[tuple[nn.Module, ModelPlan]], groups: ProcessGroups) -> Finding | None:
    """Find a parameter that two stages hold under one global name although no rule adds its gradients.

    Collective over the stages. Names count only if a module declares them (`global_names`), because stages number their
    own layers otherwise.

    Args:
        chunks: Modules and plans of this rank.
        groups: Process groups of the model.
    """
    if groups.size("pp") == 1:
        return None
    mine = []
    for module, plan in chunks:
        name_of = namer(module)
        for name in plan.params:
            whole = name_of(name)
            is_said = whole != without_transparent(name.split("."))
            mine.append((whole, is_said, plan.contracts[name].crosses_stages))
    answers = agree.gather(mine, groups.control("pp"), "the names of parameters of all stages")
    first: dict[str, tuple[int, bool, bool]] = {}
    for rank, names in answers.items():
        for name, is_said, is_added in names:
            other, was_said, was_added = first.setdefault(name, (rank, is_said, is_added))
            if other != rank and (is_said or was_said) and not (is_added and was_added):
                text = (
                    f"parameter {name!r} of the whole model is held by two stages, on ranks {other} and {rank} of "
                    f"pipeline {list(answers)}, and no rule adds their gradients. Tie copies of one weight "
                    "(shared_embedding = True on both), or give each layer to one stage and name it so (global_names)"
                )
                return AFTER_INPUTS, dist.get_rank(), text
    return None


def refuse_unequal(
    finding: Finding | None, groups: ProcessGroups, *, step: int, warns: bool = False, describe: Describe = list
) -> None:
    """Raise the finding of any rank on all ranks.

    Collective: at the wrap over one stage, later over the job.

    Args:
        finding: This rank's finding, or None.
        groups: Process groups of the model.
        step: 0 at the wrap, then the step of the comparison.
        warns: Warn instead of raising an error.
        describe: Returns lines that explain the finding if ranks differ.

    Raises:
        LayoutMismatch: If copies differed from the start.
        ReplicaDriftError: If copies have become different in training.
    """
    asked = control_of_stage(groups) if step == 0 else world_groups(groups)
    finding = agree.first(finding, asked, "the guard of equal weights")
    if finding is None:
        return
    kind, rank, found = finding
    if step > 1:
        tables = agree.gather(describe(), asked, "the optimizers' steps")
        differs = any(table != tables[rank] for table in tables.values())
        likeliest = f"Likeliest: {agree.first_difference(tables)}. Else" if differs else "Likeliest"
        error: Exception = ReplicaDriftError(
            f"{found}, in step {step}. {likeliest}: {STEPS if kind == DATA else CLIPS}"
        )
    elif step == 1 and kind != ACROSS_STAGES:
        error = LayoutMismatch(f"{found}, and they were equal at the wrap. {AFTER_THE_WRAP} {REMEDIES[kind]}")
    else:
        error = LayoutMismatch(f"{found}, at the start. {REMEDIES[kind]}")
    raise_or_warn(error, rank, warns=warns)


def raise_or_warn(error: Exception, rank: int, *, warns: bool) -> None:
    """Raise an error that all ranks have, or warn on one rank.

    Args:
        error: The error.
        rank: Rank that warns.
        warns: Warn instead of raising.
    """
    if not warns:
        raise error
    if dist.get_rank() == rank:
        warn_user(f"rank {rank}, the first two steps: {error}")

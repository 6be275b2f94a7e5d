"""Copies of a weight must be equal on all ranks that hold one. Ranks compare them in the first steps, then at times.

Small parameters are compared and sent many at a time. Buffers of modules (running statistics) are not compared.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.contract.global_names import namer, without_transparent
from core.distributed.guard.finite import Finding, ReplicaDriftError
from core.distributed.layout.model_plan import ModelPlan
from core.distributed.wire.collectives import Collectives
from core.groups import agree
from core.groups.agree import LayoutMismatch
from core.groups.process_groups import ProcessGroups, world_groups
from core.groups.rank_grid import COPY_AXES, DATA_KINDS, MODEL_AXES, STAGE_CROSSING

DATA, WITHIN_STAGE, ACROSS_STAGES = range(3)  # which copies differ
AFTER_INPUTS = 1  # the order of a finding: other inputs explain more
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
CAUSES = {  # of weights that have become unequal in training, likeliest first
    DATA: "Likeliest: a rank left out an optimizer's step, clipped alone, or stepped with another learning rate, decay "
    "or seed; or weights were initialised or loaded again on some ranks. All data ranks make the same step. " + RESTART,
    WITHIN_STAGE: "Likeliest: torch.nn.utils.clip_grad_norm_, which clips by the norm of one rank's own slices; clip "
    "by OptimizerConfig(clip_grad=...) or optimizer.clip_grad_norm, which count every gradient once. Else: a rank left "
    "out an optimizer's step, or stepped with another learning rate, decay or seed; or weights were initialised or "
    "loaded again. " + RESTART,
    ACROSS_STAGES: "Likeliest: torch.nn.utils.clip_grad_norm_, which clips by the norm of one stage; clip by "
    "OptimizerConfig(clip_grad=...). Else: stages left out an optimizer's step, or stepped with another learning rate "
    "or decay. " + RESTART,
}
SMALL_NUMEL = 2**16  # a larger parameter is not worth a copy
PACK_NUMEL = 2**20  # elements of small ones that are copied together


def pack(parts: Iterable[torch.Tensor], limit: int, alone: int) -> Iterator[list[torch.Tensor]]:
    """Cut tensors into lists: one of at least `alone` or `limit` elements alone, small ones up to `limit` together.

    Empty ones are left out. The lists follow from the sizes, so they are the same on ranks with the same model.
    """
    together: list[torch.Tensor] = []
    room = limit
    for part in parts:
        numel = part.numel()
        if together and numel and (numel >= alone or numel > room):
            yield together
            together, room = [], limit
        if numel >= min(alone, limit):
            yield [part]
        elif numel:
            together.append(part)
            room -= numel
    if together:
        yield together


def packs_of(params: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut parameters into lists of one dtype that are compared, or sent, together."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for param in params:
        by_dtype.setdefault(param.dtype, []).append(param)
    for alike in by_dtype.values():
        yield from pack(alike, PACK_NUMEL, SMALL_NUMEL)


def first_unequal(
    named: Iterable[tuple[str, Sequence[torch.Tensor]]], group: dist.ProcessGroup, group_name: str
) -> str | None:
    """The first parameter whose copies are not equal on all ranks of a group, in words. Collective over `group`.

    named: (name, the copies that this rank holds), in one order on all ranks; names may differ between stages. A hash
    travels; the checksums of single parameters only where hashes differ.
    """
    named, rank, what = list(named), dist.get_rank(), f"the weights of group {group_name}"
    with torch.inference_mode():  # autograd keeps no account of the views
        sums = [checksum(_flat(pack)).tolist() for pack in packs_of(copies[0] for _, copies in named)]
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
    """The checksum of equal copies. Where a rank's own copies differ, the result differs from that of every rank."""
    sums = {tuple(checksum(copy).tolist()) for copy in copies}
    return sums.pop() if len(sums) == 1 else (rank, *sorted(sums))


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Three int64 sums [3] over the bits of a tensor: plain, weighted by column and by row of a table 61 wide.

    Equal for equal tensors; one changed element, or two exchanged ones, change at least one of the sums. They lie on
    the tensor's device, which is not waited for.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return torch.zeros(3, dtype=torch.int64, device=flat.device)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(torch.uint8).view(integers) if flat.dtype.is_floating_point else flat
    width = 61
    body, tail = bits[: bits.numel() // width * width].view(-1, width), bits[bits.numel() // width * width :]
    columns = body.sum(dim=0, dtype=torch.int64)
    columns[: tail.numel()] += tail
    rows = torch.cat([body.sum(dim=1, dtype=torch.int64), tail.sum(dtype=torch.int64).reshape(1)])
    numbers = torch.arange(1, max(width, rows.numel()) + 1, device=flat.device)
    by_column, by_row = columns * numbers[:width], rows * numbers[: rows.numel()]
    return torch.stack([columns.sum(), by_column.sum(), by_row.sum()])


def _within_stage(plan: ModelPlan, groups: ProcessGroups) -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
    """(group, parameters of which each of its ranks holds a copy), in one order of groups on all ranks."""
    others = (rule.group for rule in plan.rules if rule.group not in STAGE_CROSSING)
    for name in dict.fromkeys((*DATA_KINDS, *COPY_AXES, *others)):
        if groups.size(name) > 1:
            yield name, plan.of_group(name) if name in DATA_KINDS else plan.copies_over(name)


def unequal_within_stage(
    plan: ModelPlan,
    groups: ProcessGroups,
    values: Mapping[str, torch.Tensor] | None = None,
    shards: Mapping[str, torch.Tensor] | None = None,
) -> Finding | None:
    """The first weight of a model chunk whose copies within its stage are not equal. Collective over their groups.

    values: by parameter what is compared in its place, such as a checksum. shards: the same for this rank's part of
    each sharded parameter, of which data ranks hold no copies, but those of other optimizer instances do.
    """
    finding: Finding | None = None
    shards = shards or {}
    held_over = dict(_within_stage(plan, groups))
    instances = {f"inter_{name}": name for name in DATA_KINDS if shards and groups.size(f"inter_{name}") > 1}
    held_over |= {name: plan.of_group(kind) for name, kind in instances.items()}
    for name, held in held_over.items():
        of = {key: shards.get(key, param) for key, param in held.items()} if values is None else values
        keys = [key for key in held if key not in shards or name not in DATA_KINDS]
        found = first_unequal(((key, [of[key]]) for key in keys), groups.control(name), name)
        # Raised after the loop: ranks of another group may not know of it, and wait in the next comparison.
        if found is not None and finding is None:
            finding = DATA if name in (*DATA_KINDS, *instances) else WITHIN_STAGE, dist.get_rank(), found
    return finding


def unequal_across_stages(plans: Iterable[ModelPlan], groups: ProcessGroups) -> Finding | None:
    """The first weight whose copies on several pipeline stages are not equal. Collective over groups across stages.

    plans: of one model's chunks on this rank, in the model's order; a weight of one name in several is one weight.
    Sharded ones are read whole, because stages cut them at other elements.
    """
    finding: Finding | None = None
    for name in (*sorted(STAGE_CROSSING - {"pp"}), "pp"):  # as in check_stages
        if groups.size(name) == 1:
            continue
        held: dict[str, list[torch.Tensor]] = {}
        for plan in plans:
            for key, param in plan.copies_over(name).items():
                held.setdefault(key, []).append(param)
        found = first_unequal(held.items(), groups.control(name), name)
        if found is not None and finding is None:
            finding = ACROSS_STAGES, dist.get_rank(), found
    return finding


def held_twice(chunks: Sequence[tuple[nn.Module, ModelPlan]], groups: ProcessGroups) -> Finding | None:
    """A parameter that two stages hold by its name in the whole model, and no rule adds. Collective over the stages.

    chunks: of this rank. A name counts if a module says it (`global_names`): else stages number their own layers.
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


def control_of_stage(groups: ProcessGroups) -> list[dist.ProcessGroup]:
    """The control groups that together reach every rank of this pipeline stage."""
    names = ["dp_cp", *(axis for axis in MODEL_AXES if axis not in STAGE_CROSSING)]
    return [groups.control(name) for name in names if groups.size(name) > 1]


def refuse_unequal(finding: Finding | None, groups: ProcessGroups, *, step: int, warns: bool = False) -> None:
    """Raise the finding of any rank on all of them.

    Collective: at the wrap over one stage, later over the job. step: 0 at the wrap, then the step that is finalized.
    warns: give a warning in place of an error.
    """
    asked = control_of_stage(groups) if step == 0 else world_groups(groups)
    finding = agree.first(finding, asked, "the guard of equal weights")
    if finding is None:
        return
    kind, rank, found = finding
    if step > 1:
        error: Exception = ReplicaDriftError(f"{found}, in step {step}. {CAUSES[kind]}")
    elif step == 1 and kind != ACROSS_STAGES:
        error = LayoutMismatch(f"{found}, and they were equal at the wrap. {AFTER_THE_WRAP} {REMEDIES[kind]}")
    else:
        error = LayoutMismatch(f"{found}, at the start. {REMEDIES[kind]}")
    if not warns:
        raise error
    if dist.get_rank() == rank:
        warnings.warn(str(error), stacklevel=5)


@torch.no_grad()
def broadcast_weights(
    plan: ModelPlan, groups: ProcessGroups, collectives: Collectives, only: Collection[str] | None = None
) -> None:
    """Make all copies within a stage, or `only` these, equal to those of each group's first rank. Collective."""
    for name, held in _within_stage(plan, groups):
        for pack in packs_of(param for key, param in held.items() if only is None or key in only):
            in_place = len(pack) == 1 and pack[0].is_contiguous()
            flat = pack[0].data if in_place else _flat(pack)
            collectives.broadcast(flat, groups.require(name), "the initial weights")
            if not in_place and groups.rank(name) > 0:
                for param, part in zip(pack, flat.split([param.numel() for param in pack]), strict=True):
                    param.data.copy_(part.view_as(param))


@torch.no_grad()
def _flat(pack: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(pack) == 1:
        return pack[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in pack])

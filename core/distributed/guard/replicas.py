"""Comparison of weight copies, which must be the same on all ranks. Buffers of modules are not compared.

Copies are compared at the wrap, after the first two optimizer steps, and every ``check_weights_interval`` steps. Within
a step a program may change each rank's copies differently, as sharpness-aware minimization and per-rank noise do. So
checksums are computed after an optimizer's step, or when the next step begins, and ``finalize_model_grads`` compares
them. Weights differ only if they also differ there. Our optimizer compares before it writes, because a gather would mix
different weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.guard.finite import Finding, ReplicaDriftError
from core.distributed.layout.model_plan import ModelPlan
from core.distributed.wire.packs import flat_of, packs_of
from core.groups import agree
from core.groups.agree import LayoutMismatch
from core.groups.process_groups import ProcessGroups, control_of_stage, world_groups
from core.groups.rank_grid import COPY_AXES, DATA_KINDS, STAGE_CROSSING
from core.watch.warn_user import warn_user

Describe = Callable[[], list[str]]  # returns lines about this rank
FIRST_STEPS = 2  # number of first steps after which weights are compared
DATA, WITHIN_STAGE, ACROSS_STAGES = range(3)  # which copies differ
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
# Causes of unequal weights in training, likeliest first.
STEPS = (
    "a rank left out an optimizer's step, clipped alone, or stepped with another learning rate, decay or seed; or "
    "weights were initialised or loaded again on some ranks. Otherwise restart from an earlier checkpoint, and look "
    "for a lost message or damaged memory"
)
CLIPS = (
    "torch.nn.utils.clip_grad_norm_, which clips by the norm of one rank's part of the model; clip by "
    "OptimizerConfig(clip_grad=...) or optimizer.clip_grad_norm, which count every gradient once. Else: " + STEPS
)


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return three int64 sums [3] over a dense tensor's bits: plain, weighted by column and by row of a 61-wide table.

    Equal for equal tensors. One changed element, or two exchanged ones, change at least one of the sums. They are on
    the tensor's device, and the host does not wait for them.
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


def checksums(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a checksum for each pack of tensors. Local; does not wait for the device."""
    with torch.inference_mode():  # autograd does not track the views
        return [checksum(flat_of(pack)) for pack in packs_of(tensors)]


def is_readable(tensor: torch.Tensor) -> bool:
    """Return True for a plain tensor with values, which can be read without changing the program."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    if not plain or tensor.is_complex() or tensor.is_quantized or torch.compiler.is_compiling():
        return False
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # inside torch.func, whose tensors have no memory
        return False


def first_unequal(named: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup, group_name: str) -> str | None:
    """Describe the first parameter whose copies differ between ranks of a group, or return None. Collective.

    All ranks list their parameters in one order. Names may differ between stages. Only a hash is sent. The checksums of
    single parameters are sent only if hashes differ.
    """
    named, what = list(named), f"the weights of group {group_name}"
    if agree.equal([sums.tolist() for sums in checksums(tensor for _, tensor in named)], group, what):
        return None
    everyone = agree.gather([(name, checksum(tensor).tolist()) for name, tensor in named], group, what)
    ranks = list(everyone)
    for row in itertools.zip_longest(*everyone.values(), fillvalue=("nothing", [])):
        name, expected = row[0]
        unequal = {rank: other for rank, (other, theirs) in zip(ranks, row, strict=True) if theirs != expected}
        if unequal:
            there = next(iter(unequal.values()))
            other = "" if there == name else f" (there it is {there!r})"
            text = f"parameter {name!r} has other values on ranks {list(unequal)}{other} than on rank {ranks[0]}"
            return f"{text} of group {group_name!r} {ranks}"
    return f"weights differ between the ranks {ranks} of group {group_name!r}, but no parameter's checksum does"


def within_stage(plan: ModelPlan, groups: ProcessGroups) -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
    """Yield groups within the stage and the parameters that their ranks hold copies of, in one order on all ranks."""
    others = (rule.group for rule in plan.rules if rule.group not in STAGE_CROSSING)
    for name in dict.fromkeys((*DATA_KINDS, *COPY_AXES, *others)):
        if groups.size(name) > 1:
            yield name, plan.of_group(name) if name in DATA_KINDS else plan.copies_over(name)


def _copies_across_stages(plan: ModelPlan, groups: ProcessGroups) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights of a chunk that other pipeline stages hold copies of, by group and name."""
    names = (*sorted(STAGE_CROSSING - {"pp"}), "pp")  # as in check_stages
    return {name: dict(plan.copies_over(name)) for name in names if groups.size(name) > 1}


def unequal_weights(copies: Mapping[str, Mapping[str, torch.Tensor]], groups: ProcessGroups) -> Finding | None:
    """Find the first weight, by group and name, whose copies differ. Collective over all groups with copies.

    Ranks of other groups may find none. A weight may be replaced by its checksum.
    """
    findings: list[Finding] = []
    for name, of_group in copies.items():
        text = first_unequal(of_group.items(), groups.control(name), name)
        kind = DATA if name.removeprefix("inter_") in DATA_KINDS else WITHIN_STAGE
        if text is not None:
            findings.append((ACROSS_STAGES if name in STAGE_CROSSING else kind, dist.get_rank(), text))
    return findings[0] if findings else None


def refuse_unequal(
    finding: Finding | None, groups: ProcessGroups, *, step: int, warns: bool = False, describe: Describe = list
) -> None:
    """Raise the finding of any rank on all ranks: LayoutMismatch if copies differed from the start, or else
    ReplicaDriftError.

    Collective: at the wrap (step 0) over one stage, later over the job. ``describe`` returns lines that explain the
    finding if ranks differ.
    """
    chain = control_of_stage(groups) if step == 0 else world_groups(groups)
    finding = agree.first(finding, chain, "the guard of equal weights")
    if finding is None:
        return
    kind, rank, text = finding
    if step > 1:
        tables = agree.gather(describe(), chain, "the optimizers' steps")
        differs = any(table != tables[rank] for table in tables.values())
        likeliest = f"Likeliest: {agree.first_difference(tables)}. Else" if differs else "Likeliest"
        error: Exception = ReplicaDriftError(f"{text}, in step {step}. {likeliest}: {STEPS if kind == DATA else CLIPS}")
    elif step == 1 and kind != ACROSS_STAGES:
        error = LayoutMismatch(f"{text}, and they were equal at the wrap. {AFTER_THE_WRAP} {REMEDIES[kind]}")
    else:
        error = LayoutMismatch(f"{text}, at the start. {REMEDIES[kind]}")
    raise_or_warn(error, rank, warns=warns)


def raise_or_warn(error: Exception, rank: int, *, warns: bool) -> None:
    """Raise an error that all ranks have, or warn about it on one rank."""
    if not warns:
        raise error
    if dist.get_rank() == rank:
        warn_user(f"rank {rank}, the first two steps: {error}")


class Parameters(Protocol):
    """Interface of parameters for WeightWatch."""

    def own_part_of(self, param: torch.nn.Parameter) -> tuple[int, torch.Tensor] | None: ...
    def reading(self) -> AbstractContextManager[None]: ...


class WeightWatch:
    """Weights of one wrapped chunk, and the steps after which they are compared."""

    def __init__(
        self, plan: ModelPlan, groups: ProcessGroups, params: Parameters, ddp_config: DistributedDataParallelConfig
    ) -> None:
        self.plan, self.groups, self.params = plan, groups, params
        self.compares = ddp_config.initial_weights != "ignore"
        self.warns = ddp_config.first_steps == "warn"
        self.interval = ddp_config.check_weights_interval
        self.left = FIRST_STEPS if ddp_config.first_steps != "ignore" else 0
        self.is_due = False  # the same on all ranks
        self.sums: dict[str, list[torch.Tensor]] | None = None  # checksums by group, since the last optimizer's step

    def record(self, *, again: bool = False) -> None:
        """Compute the checksums if they are due, and ``again`` if they were computed before. Local, without a wait."""
        if self.is_due and (again or self.sums is None):
            self.sums = self._sums()

    def _sums(self) -> dict[str, list[torch.Tensor]]:
        is_sharded = any(self.params.own_part_of(param) is not None for param in self.plan.named.values())
        across = {} if is_sharded else _copies_across_stages(self.plan, self.groups)
        return {name: checksums(copies.values()) for name, copies in (self.copies() | across).items()}

    def copies(self, *, cut: bool = True) -> dict[str, dict[str, torch.Tensor]]:
        """Return the weights that ranks of this stage hold copies of, by group and name.

        Data ranks hold no copies of shards, but the ranks of other optimizer instances do. Frozen parameters that are
        sharded are left out, because nothing writes them. ``cut`` is False at the wrap, before parameters are sharded.
        """
        named = self.plan.named if cut else {}
        parts = ((name, self.params.own_part_of(param)) for name, param in named.items())
        shards = {n: part[1][:0] if n in self.plan.frozen else part[1] for n, part in parts if part is not None}
        by_group = dict(within_stage(self.plan, self.groups))
        instances = {f"inter_{name}": name for name in DATA_KINDS if shards and self.groups.size(f"inter_{name}") > 1}
        by_group |= {name: self.plan.of_group(kind) for name, kind in instances.items()}
        return {
            name: {k: shards.get(k, param) for k, param in params.items() if k not in shards or name not in DATA_KINDS}
            for name, params in by_group.items()
        }

    def take_difference(self) -> bool:
        """Drop the checksums, and return True if they differ between ranks. Collective over the groups of copies."""
        sums, self.sums = self.sums or self._sums(), None
        what = "the weights after the last step"
        equal = [agree.equal([s.tolist() for s in of], self.groups.control(name), what) for name, of in sums.items()]
        return not all(equal)

    def end_step(self, step: int, *, counts: bool) -> None:
        """Decide if weights are compared after this step. ``counts`` is False if it is not one of the first steps."""
        self.is_due = (counts and self.left > 0) or (self.interval > 0 and (step + 1) % self.interval == 0)
        self.left -= counts and self.left > 0


def _unequal_across_stages(watches: Sequence[WeightWatch], groups: ProcessGroups) -> Finding | None:
    """Find the first weight whose copies on several pipeline stages differ. Collective over groups across stages.

    Equal names in several chunks mean one weight. Sharded weights are read unsharded, because stages shard them
    differently.
    """
    copies: dict[str, dict[str, torch.Tensor]] = {}
    here: Finding | None = None  # of two chunks of this rank
    with torch.no_grad(), ExitStack() as stack:  # nothing is saved for a backward, so chunks may be read together
        for watch in watches:
            stack.enter_context(watch.params.reading())
            for name, of_group in _copies_across_stages(watch.plan, groups).items():
                of_chunks = copies.setdefault(name, {})  # also if empty: other ranks of the group compare theirs
                for key, tensor in of_group.items():
                    other = of_chunks.setdefault(key, tensor)
                    if other is not tensor and not torch.equal(checksum(other), checksum(tensor)):
                        text = f"parameter {key!r} has other values in two chunks of this rank"
                        here = ACROSS_STAGES, dist.get_rank(), text
        return unequal_weights(copies, groups) or here


def compare_weights(watches: Sequence[WeightWatch], step: int, describe: Describe, *, at_once: bool = False) -> None:
    """Compare the copies of one model's weights, if that is due. Collective: every rank of the job must call it.

    With ``at_once``, compare the current values, before an optimizer writes them. Raises as ``refuse_unequal``.
    """
    first, groups = watches[0], watches[0].groups
    if not first.compares or not (first.is_due or step == 1):
        return
    findings: list[Finding | None] = []
    is_due = first.is_due
    if is_due and not at_once:
        differ = [watch.take_difference() for watch in watches]
        is_due = agree.any(any(differ), world_groups(groups), "the weights after the last step")
    if is_due:
        findings += [unequal_weights(watch.copies(), groups) for watch in watches]
    if is_due or (step == 1 and not at_once):  # stages meet in the first step for the first time
        findings.append(_unequal_across_stages(watches, groups))
    for watch in watches:
        watch.is_due = False
    finding = next((found for found in findings if found is not None), None)
    warns = first.warns and step <= FIRST_STEPS + 1
    refuse_unequal(finding, groups, step=step, warns=warns, describe=describe)

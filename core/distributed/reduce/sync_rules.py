"""GradSync: runs the sync rules that remain after a bucket is reduced over its data group.

Within a stage all members of a rule's group have the same layout. A rule's part of a bucket is therefore packed into a
few collectives as soon as the bucket is reduced. Stages share only the order of the served parameters, so across stages
each parameter has its own collective. If gradients are sharded, only the slice owned by this rank is communicated.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.distributed.buffer.bucket import Bucket
from core.distributed.contract.gradient_contract import GradSyncRule
from core.distributed.guard.agreement import Member, share_used, unequal_copies
from core.distributed.wire.collectives import Collectives, InFlight
from core.distributed.wire.packs import pack
from core.groups import agree
from core.groups.agree import SyncError
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import COPY_AXES, STAGE_CROSSING

IN_PLACE_NUMEL = 2**20  # a slice this large is reduced in place, without packing
PACK_NUMEL = 2**24  # smaller ones share a collective of at most this many elements


@dataclass(slots=True)
class PendingSync:
    """One collective of a rule. If slices were packed into ``flat``, ``parts`` are their original memory."""

    handle: InFlight
    parts: list[torch.Tensor]
    flat: torch.Tensor | None

    def wait(self) -> None:
        """Complete the collective and copy the result back into the gradients."""
        self.handle.wait()
        if self.flat is not None:
            for part, reduced in zip(self.parts, self.flat.split([p.numel() for p in self.parts]), strict=True):
                part.copy_(reduced)


class GradSync:
    """The sync rules of one wrapped model chunk, planned once. Rules over a group of one rank are ignored.

    ``buckets`` are in launch order, and ``registration`` has the parameters' names in an order that all ranks of a rule
    share.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        rules: Sequence[GradSyncRule],
        groups: ProcessGroups,
        collectives: Collectives,
        registration: Sequence[str],
    ) -> None:
        self.position = {name: position for position, name in enumerate(registration)}
        self.buckets = list(buckets)
        self.groups = groups
        self.collectives = collectives
        self.rules = [rule for rule in rules if groups.size(rule.group) > 1]
        self.copied_over = [name for name in (*COPY_AXES, "pp") if groups.size(name) > 1]
        self.stages_checked = False  # by `check_stages`
        self.pending: list[PendingSync] = []
        # rule index -> [(bucket, index of the parameter)], and for rules within a stage the same by bucket.
        self.served = [
            [(bucket, i) for bucket in buckets for i, contract in enumerate(bucket.contracts) if rule.serves(contract)]
            for rule in self.rules
        ]
        self.within: dict[int, list[tuple[GradSyncRule, list[int]]]] = {}
        for rule, served in zip(self.rules, self.served, strict=True):
            if rule.group in STAGE_CROSSING:
                continue
            by_bucket: dict[int, list[int]] = {}
            for bucket, i in served:
                by_bucket.setdefault(id(bucket), []).append(i)
            for bucket_id, indices in by_bucket.items():
                self.within.setdefault(bucket_id, []).append((rule, indices))

    @functools.cached_property
    def copies(self) -> dict[str, list[Member]]:
        """For each group, the parameters that other ranks of the group hold copies of, in registration order."""
        found: dict[str, list[Member]] = {}
        for bucket in self.buckets:
            for i, contract in enumerate(bucket.contracts):
                served_over = (rule.group for rule in self.rules if rule.serves(contract))
                for name in dict.fromkeys((*contract.replicated_over, *served_over)):
                    found.setdefault(name, []).append((bucket, i))
        for members in found.values():
            members.sort(key=lambda member: self.position[member[0].contracts[member[1]].name])
        return found

    def launch(self, bucket: Bucket) -> None:
        """Start the rules within a stage on a bucket that was just reduced. Collective over each rule's group."""
        for position, (rule, indices) in enumerate(self.within.get(id(bucket), ())):
            if position > 0:
                self.wait()  # two rules may serve one parameter: the second one needs the first one's result
            group = self.groups.require(rule.group)
            for parts in pack([bucket.valid_part(i) for i in indices], PACK_NUMEL, IN_PLACE_NUMEL):
                in_place = len(parts) == 1 and parts[0].device == bucket.device
                flat = parts[0] if in_place else torch.cat(parts).to(bucket.device)
                handle = self.collectives.all_reduce(flat, group, f"the sync rule {rule.name}", rule.op)
                self.pending.append(PendingSync(handle, parts, None if in_place else flat))

    def wait(self) -> None:
        for sync in self.pending:
            sync.wait()
        self.pending.clear()

    def crossing(self, rule: GradSyncRule) -> list[tuple[str, torch.Tensor]]:
        """Return name and valid slice of each gradient that a stage-crossing rule serves, in registration order."""
        if rule not in self.rules:
            return []
        served = self.served[self.rules.index(rule)]
        named = [(bucket.contracts[i].name, bucket.valid_part(i)) for bucket, i in served]
        return sorted(named, key=lambda item: self.position[item[0]])


def sync_across_stages(chunks: Sequence[GradSync]) -> None:
    """Run the stage-crossing rules over this rank's chunks of one model. Collective over each rule's group.

    If several virtual pipeline chunks hold copies of a parameter (equal names), their gradients are added first, and
    all copies get the result.
    """
    rules = list(dict.fromkeys(rule for chunk in chunks for rule in chunk.rules if rule.group in STAGE_CROSSING))
    for rule in rules:
        copies: dict[str, list[torch.Tensor]] = {}
        for chunk in chunks:
            for name, part in chunk.crossing(rule):
                copies.setdefault(name, []).append(part)
        group = chunks[0].groups.require(rule.group)
        handles = []
        for first, *others in copies.values():
            device = next(bucket.device for chunk in chunks for bucket in chunk.buckets)
            total = first.to(device)  # no copy, unless it is on the host
            for other in others:
                total.add_(other.to(total.device))
            if rule.op == "mean" and others:
                total.div_(1 + len(others))
            handle = chunks[0].collectives.all_reduce(total, group, f"the sync rule {rule.name}", rule.op)
            handles.append((handle, total, [part for part in (first, *others) if part is not total]))
        for handle, total, parts in handles:
            handle.wait()
            for part in parts:
                part.copy_(total)


def agree_on_copies(chunks: Sequence[GradSync], written: tuple[bool, bool]) -> tuple[bool, bool]:
    """Mark a parameter as used on all ranks that hold copies of it if any of them used it.

    Collective, once a step, over each group of copies. The tensor-parallel group, and then the group of all stages,
    carry an error to the other ranks. ``written`` is this rank's ``StepAnswer.written``, and is returned combined over
    all ranks of the model.

    Raises:
        SyncError: On every rank of the model, if a copy is frozen on some ranks only, or if it was used on some ranks
            only and no rule adds the gradients.
    """
    groups, last = chunks[0].groups, chunks[0].copied_over
    names = [*sorted({rule.group for chunk in chunks for rule in chunk.rules} - set(last)), *last]
    failure: SyncError | None = None
    for name in names:
        group = groups.control(name)
        alike = _copies_over(chunks, name)
        for first, *others in alike:
            first[0].used[first[1]] |= any(bucket.used[i] for bucket, i in others)
        members = [first for first, *_ in alike]
        served = (zip(chunk.rules, chunk.served, strict=True) for chunk in chunks)
        summed = {(id(b), i) for of_chunk in served for rule, of in of_chunk if rule.group == name for b, i in of}
        must = [(id(bucket), i) not in summed for bucket, i in members]  # used on all ranks, or on none
        digest = zlib.crc32(
            bytes(
                2 * bucket.params[i].requires_grad + (bucket.used[i] and alone)
                for (bucket, i), alone in zip(members, must, strict=True)
            )
        )
        unused = any(not bucket.used[i] for bucket, i in members)
        mine = [unused, failure is not None, *written, digest]
        (*_, lowest), (any_unused, any_failure, *any_written, highest) = agree.bounds(
            mine, group, f"the copies over group {name}"
        )
        written = bool(any_written[0]), bool(any_written[1])
        if highest != lowest:
            failure = unequal_copies(members, group, f"group {name!r}", must)
        elif any_failure:
            messages = agree.gather(None if failure is None else str(failure), group, "the copies")
            failure = failure or SyncError(next(message for message in messages.values() if message is not None))
        if any_unused:
            share_used(members, group)
        for first, *others in alike:
            for bucket, i in others:
                bucket.used[i] = first[0].used[first[1]]
    if failure is not None:
        raise failure
    return written


def _copies_over(chunks: Sequence[GradSync], name: str) -> list[list[Member]]:
    """Return the parameters with copies, in one order on all ranks, each with its copies in this rank's chunks."""
    alike: dict[tuple[int, str], list[Member]] = {}
    for number, chunk in enumerate(chunks):
        for bucket, i in chunk.copies.get(name, ()):
            key = 0 if name in STAGE_CROSSING else number, bucket.contracts[i].name
            alike.setdefault(key, []).append((bucket, i))
    return list(alike.values())


def check_stages(chunks: Sequence[GradSync]) -> None:
    """Check that all stages bring the same copies to the stage-crossing rules, or raise LayoutMismatch on every stage.

    Compares once, before the rules first run. Collective over every group that crosses stages. The group of all stages
    comes last, and passes the result of an earlier group to the stages between.
    """
    if all(chunk.stages_checked for chunk in chunks):
        return
    groups = chunks[0].groups
    names = [name for name in (*sorted(STAGE_CROSSING - {"pp"}), "pp") if groups.size(name) > 1]
    agree.same((f"group {name!r}", groups.control(name), _table(chunks, name)) for name in names)
    for chunk in chunks:
        chunk.stages_checked = True


def _table(chunks: Sequence[GradSync], group: str) -> list[str]:
    lines = []
    for rule in dict.fromkeys(rule for chunk in chunks for rule in chunk.rules if rule.group == group):
        sizes = {name: part.numel() for chunk in chunks for name, part in chunk.crossing(rule)}
        for number, numel in enumerate(sizes.values()):
            lines.append(f"copy {number} for {rule.name!r} of {numel} elements")
    return lines

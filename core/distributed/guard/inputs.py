"""Inputs: what a wrapped model was given in a step, as checksums that stay on the device until a step ends.

Ranks of one tensor-parallel group must be given the same tokens, ranks of one context-parallel group parts of the same
batch, and the first and the last pipeline stage the same microbatch. Data ranks must not all be given the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from core.distributed.buffer.bucket import Bucket
from core.distributed.guard.finite import Finding
from core.distributed.guard.replicas import checksum
from core.groups import agree
from core.groups.process_groups import ProcessGroups

INPUTS = 0  # the order of a finding: what explains the others comes first
MOST_NAMES = 5  # in a message
LEAST_EMPTY = 4  # rows without a gradient that a table of words must have to be known as one
MOST_ROWS = 2**18
MOST_FORWARDS = 16  # of a step that are noted
MOST_DEPTH = 4  # of containers inside one another
OF_WHOLE = "whole_of_this_part"  # the attribute of a part of a batch: the whole that it was cut from


def note_whole(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Remember what a part of a batch of whole numbers, such as tokens, was cut from; returns the part.

    The whole lives as long as the part. Parts of activations, which are large, are not marked.
    """
    if not (whole.is_floating_point() or whole.is_complex()):
        setattr(part, OF_WHOLE, whole)
    return part


class Leaf(NamedTuple):
    """A tensor among the inputs: where it lies, its shape, and its checksum."""

    path: str  # such as "forward 0, input_ids"
    shape: tuple[int, ...]
    is_whole_number: bool
    varies: bool  # True if its elements are not all equal
    sums: tuple[int, int, int]
    of_whole: tuple[int, ...]  # the checksum of the batch that it is a part of; empty if that is not known


class Inputs:
    """Checksums of the inputs of one step."""

    def __init__(self) -> None:
        self.noted: list[list[tuple[str, tuple[int, ...], bool, list[torch.Tensor]]]] = []  # by forward

    def note(self, given: Any) -> None:
        """Note the tensors of one forward. A few small operations a tensor on its device, which is not waited for."""
        number = len(self.noted)
        if number >= MOST_FORWARDS:
            return
        self.noted.append([])
        for path, tensor in _leaves(given, "", MOST_DEPTH):
            if _is_readable(tensor):
                varies = (tensor.detach() != tensor.detach().reshape(-1)[0]).any().reshape(1).long()
                whole = getattr(tensor, OF_WHOLE, None)
                is_part = whole is not None and _is_readable(whole)
                numbers = [checksum(tensor), varies, *([checksum(whole)] if is_part else [])]
                path, is_whole_number = f"forward {number}{path}", not tensor.is_floating_point()
                self.noted[number].append((path, tuple(tensor.shape), is_whole_number, numbers))

    def take(self) -> list[Leaf]:
        """Take what was noted since the last call, read from the device at once."""
        noted = [leaf for forward in self.noted for leaf in forward]
        self.noted.clear()
        if not noted:
            return []
        device = noted[-1][-1][0].device
        flat = torch.cat([number.to(device) for *_, numbers in noted for number in numbers]).tolist()
        leaves, at = [], 0
        for path, shape, is_whole_number, numbers in noted:
            own = flat[at : at + sum(number.numel() for number in numbers)]
            at += len(own)
            leaves.append(Leaf(path, shape, is_whole_number, bool(own[3]), tuple(own[:3]), tuple(own[4:])))
        return leaves


def whole_numbers(given: Any) -> Iterator[torch.Tensor]:
    """The tensors of whole numbers among the inputs of a forward."""
    for _, tensor in _leaves(given, "", MOST_DEPTH):
        if _is_readable(tensor) and not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            yield tensor


def _leaves(given: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(given, torch.Tensor):
        yield path, given
    elif depth and isinstance(given, Mapping):
        for key, value in given.items():
            yield from _leaves(value, f"{path}, {key}", depth - 1)
    elif depth and isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        for number, value in enumerate(given):
            yield from _leaves(value, f"{path}, {number}", depth - 1)


def _is_readable(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    return plain and tensor.numel() > 0 and not (tensor.is_complex() or tensor.is_quantized)


def other_inputs(
    inputs: Sequence[Leaf], groups: ProcessGroups, *, may_be_parts: bool
) -> tuple[Finding | None, Finding | None]:
    """(a mistake, a doubt): inputs that differ where they must not, or where they may. Collective over tp and cp.

    Numbers with a fraction may be activations, which differ by rounding: those of copies show in the gradients.
    """
    found = doubt = None
    if groups.size("tp") > 1:
        tokens = {leaf.path: leaf[:2] + leaf.sums for leaf in inputs if leaf.is_whole_number and leaf.shape}
        text = _unequal(tokens, groups, "tp", "see the same batch, each its part of the layers")
        found, doubt = (None, text) if may_be_parts else (text, None)
    if groups.size("cp") > 1:
        wholes = {leaf.path: leaf.of_whole for leaf in inputs if leaf.of_whole}
        found = found or _unequal(wholes, groups, "cp", "hold parts of one batch, cut from the same whole")
    return found, doubt


def _unequal(mine: dict[str, Any], groups: ProcessGroups, name: str, rule: str) -> Finding | None:
    """The first input that differs between ranks of a group. Collective over it."""
    group, what = groups.control(name), f"the inputs over group {name}"
    if agree.equal(mine, group, what):
        return None
    answers = agree.gather(mine, group, what)
    (rank, reference), *others = answers.items()
    for other, theirs in others:
        path = next((path for path in reference if path in theirs and theirs[path] != reference[path]), None)
        if path is not None:
            text = (
                f"the inputs differ between ranks {rank} and {other} of group {name!r} {list(answers)}, first in "
                f"{path}. The ranks of this group must {rule}: choose data by "
                "parallel_state.get_data_parallel_rank(), and draw it from one seed in such a group"
            )
            return INPUTS, dist.get_rank(), text
    return None


def other_microbatches(ends: Sequence[Leaf], groups: ProcessGroups) -> Finding | None:
    """Microbatches of which first and last stage have nothing in common. Collective over the stages.

    A stage may be given a placeholder for what it does not read, so one tensor that both have is enough.
    """
    if groups.size("pp") == 1:
        return None
    is_end = groups.rank("pp") in (0, groups.size("pp") - 1)
    mine = {leaf.path: leaf.shape + leaf.sums for leaf in ends if leaf.varies} if is_end else {}
    answers = agree.gather(mine, groups.control("pp"), "the microbatches of the ends of a pipeline")
    ranks = list(answers)
    start, end = answers[ranks[0]], answers[ranks[-1]]
    common = [path for path in start if path in end]
    if not common or any(start[path] == end[path] for path in common):
        return None
    text = (
        f"the first stage (rank {ranks[0]}) and the last one (rank {ranks[-1]}) of pipeline {ranks} were given "
        f"different microbatches: none of {common[:MOST_NAMES]} is equal, so labels belong to other tokens. Give all "
        "stages of a pipeline the same batch: choose it by parallel_state.get_data_parallel_rank()"
    )
    return INPUTS, dist.get_rank(), text


def same_on_data_ranks(inputs: Sequence[Leaf], groups: ProcessGroups) -> bool:
    """True if all data ranks were given the same inputs, which are not constants. Collective over the data ranks."""
    name = "dp" if groups.size("dp") > 1 or groups.size("cp") > 1 else "dp_cp"
    if groups.size(name) == 1:
        return False
    is_equal = agree.equal(list(inputs), groups.control(name), "the inputs of data ranks")
    return is_equal and any(leaf.varies for leaf in inputs)


def same_data_twice(before: list[Leaf] | None, now: Sequence[Leaf] | None) -> list[str]:
    """One batch on all data ranks in both steps, and another one in each. Pure."""
    if not before or not now or list(before) == list(now):
        return []
    return [
        "all data-parallel ranks were given the same inputs in both, so they compute one gradient several times. Give "
        "each rank its own samples (torch.utils.data.DistributedSampler with num_replicas and rank of the data group), "
        "or another seed"
    ]


class Tables:
    """Rows of split embedding tables that the tokens of a step have used.

    Of an embedding that ranks of tensor parallelism share, a rank's first and last rows are where words of other ranks
    end up if no mask takes them out: these rows then have a gradient although no token is one of them.
    """

    def __init__(self, buckets: Sequence[Bucket], groups: ProcessGroups) -> None:
        self.groups = groups
        rank, size = groups.rank("tp"), groups.size("tp")
        self.is_first, self.is_last = rank == 0, rank == size - 1
        self.tables: list[tuple[Bucket, int]] = []
        if size > 1:
            self.tables = [
                (bucket, i)
                for bucket in buckets
                if not bucket.sharded
                for i, param in enumerate(bucket.params)
                if param.dim() == 2
                and LEAST_EMPTY < len(param) <= MOST_ROWS
                and bucket.contracts[i].sharded_over == ("tp",)
                and getattr(param, "partition_dim", -1) == 0
            ]
        self.begins = {len(bucket.params[i]): rank * len(bucket.params[i]) for bucket, i in self.tables}  # by rows
        self.asked: dict[int, torch.Tensor] = {}  # by rows: [1 + rows + 1] bool, the rows of other ranks at the ends

    def note(self, tokens: torch.Tensor) -> None:
        """Tokens of this step. Waits for nothing."""
        for rows, begin in self.begins.items():
            asked = self.asked.setdefault(rows, torch.zeros(rows + 2, dtype=torch.bool, device=tokens.device))
            asked[(tokens.detach().reshape(-1).long() - begin).clamp(-1, rows) + 1] = True

    @torch.no_grad()
    def unmasked(self) -> list[str]:
        """Tables whose rows at the seam have a gradient that no token explains. Collective over the data ranks."""
        if not self.tables:
            return []
        nothing = {rows: torch.zeros(rows + 2, dtype=torch.bool, device="cpu") for rows in self.begins}
        asked = {rows: self.asked.get(rows, none).cpu() for rows, none in nothing.items()}
        flat = torch.cat([asked[rows] for rows in self.begins]).long()
        found = agree.bounds(flat, self.groups.control("dp_cp"), "the tokens of the first step")[1]
        flat = torch.tensor(found, dtype=torch.bool, device="cpu")
        asked = dict(zip(self.begins, flat.split([rows + 2 for rows in self.begins]), strict=True))
        for bucket, i in self.tables:
            param = bucket.params[i]
            grad = bucket.part_of(bucket.valid_grad, i, bucket.valid_range)
            if grad.numel() < param.numel():  # this rank has a shard
                continue
            has = (grad.view(param.shape) != 0).any(dim=1).cpu()
            unasked = has & ~asked[len(param)][1:-1]
            seams = ([] if self.is_first else [0]) + ([] if self.is_last else [len(param) - 1])
            at_seams = int(unasked[seams].sum())
            if at_seams and at_seams == int(unasked.sum()) and int((~has).sum()) >= LEAST_EMPTY:
                return [
                    f"rows {[row for row in seams if unasked[row]]} of {bucket.contracts[i].name!r} [{len(param)}, "
                    f"{param.shape[1]}] have a gradient, and no token is one of them: they are where words of other "
                    "tensor-parallel ranks end up if nothing masks their output. Set the output of words that this "
                    "rank does not hold to zero"
                ]
        return []

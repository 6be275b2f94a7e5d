"""Do all ranks of a data group hold the same model? Asked once, when wrapping, before any other collective."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from core.agree import LayoutMismatch, control_device
from core.distributed.wire.collectives import agree_max, gather_objects
from core.waiting import waiting


def compare_tables(tables: Sequence[Sequence[str]], ranks: Sequence[int], group_name: str) -> str | None:
    """The first difference between the ranks' tables in two sentences, or None. Pure.

    A table has one line a fact ("parameter 'w': shape [2, 3], ..."); all ranks see the same tables, so all say the
    same.
    """
    reference = tables[0]
    for rank, table in zip(ranks[1:], tables[1:], strict=True):
        if list(table) == list(reference):
            continue
        longest = max(len(reference), len(table))
        for line in range(longest):
            here = table[line] if line < len(table) else "nothing: the model ends before this"
            there = reference[line] if line < len(reference) else "nothing: the model ends before this"
            if here != there:
                return (
                    f"rank {rank} has {here}; rank {ranks[0]} has {there} "
                    f"(group {group_name!r}, ranks {list(ranks)}). The ranks of this group must hold the same model; "
                    "did they build it from different configurations or in a different order?"
                )
    return None


class Facts(NamedTuple):
    """What ranks must agree on. Its `repr` is compared; the table of it is made only to say where ranks differ.

    Values with equal `repr` make equal tables.
    """

    values: Any
    lines: Callable[[], list[str]]  # one a fact


def check_same_tables(
    table: Sequence[str], group: dist.ProcessGroup, group_name: str, failure: Exception | None
) -> None:
    """`check_same` of facts that are a table already."""
    check_same(Facts(table, lambda: list(table)), group, group_name, failure)


def check_same(facts: Facts | None, group: dist.ProcessGroup, group_name: str, failure: Exception | None) -> None:
    """Raise LayoutMismatch on every rank if any rank's facts differ, or if any rank could not tell its own.

    failure: what kept this rank from telling them; it is raised again here, after the others have been told.
    Collective over `group`. One hash a rank travels; tables only on a difference.
    """
    if same_on_all(None if facts is None else facts.values, group, failed=failure is not None):
        return
    ranks = dist.get_process_group_ranks(group)
    table = [] if facts is None else facts.lines()
    tables = gather_objects((table, None if failure is None else f"{type(failure).__name__}: {failure}"), group)
    if failure is not None:
        raise failure
    for rank, (_, message) in zip(ranks, tables, strict=True):
        if message is not None:
            raise LayoutMismatch(f"rank {rank} of group {group_name!r} {ranks} could not wrap its model. {message}")
    difference = compare_tables([table for table, _ in tables], ranks, group_name)
    raise LayoutMismatch(difference or f"the models of group {group_name!r} {ranks} differ")


def same_on_all(value: Any, group: dist.ProcessGroup, *, failed: bool = False) -> bool:
    """True if the `repr` of a value is the same on all ranks of a group and none has failed. Collective over it."""
    digest = hashlib.sha256(repr(value).encode()).digest()
    words = [int.from_bytes(digest[i : i + 7], "big") for i in range(0, 28, 7)]
    mine = torch.tensor(words, dtype=torch.int64, device=control_device(group))
    bounds = torch.cat([mine, -mine, mine.new_tensor([failed])])
    with waiting("a comparison", group):
        agree_max(bounds, group).wait()
    low, high, any_failed = (-bounds[4:8], bounds[:4], bounds[8])
    return torch.equal(low, high) and not bool(any_failed)


def checksum(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Three int64 sums over the bits of a tensor: plain, weighted by column and by row of a table 61 wide.

    Equal for equal tensors; one changed element, or two exchanged ones, change at least one of the sums.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return 0, 0, 0
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(torch.uint8).view(integers) if flat.dtype.is_floating_point else flat
    width = 61
    body, tail = bits[: bits.numel() // width * width].view(-1, width), bits[bits.numel() // width * width :]
    columns = body.sum(dim=0, dtype=torch.int64)
    columns[: tail.numel()] += tail
    rows = torch.cat([body.sum(dim=1, dtype=torch.int64), tail.sum(dtype=torch.int64).reshape(1)])
    return int(columns.sum()), int((columns * _count(columns)).sum()), int((rows * _count(rows)).sum())


def _count(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, like.numel() + 1, device=like.device)

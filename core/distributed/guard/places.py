"""Places: what the names of stages and the rows of a split table say, in the first of the two steps that are watched.

Two stages that hold one parameter of the whole model need a rule that adds their gradients. And of an embedding that
ranks of tensor parallelism share, a rank's first and last rows are where words of other ranks end up if no mask takes
them out: these rows then have a gradient although no token is one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.buffer.bucket import Bucket
from core.distributed.contract.global_names import namer, without_transparent
from core.distributed.guard.finite import Finding
from core.distributed.layout.model_plan import ModelPlan
from core.groups import agree
from core.groups.process_groups import ProcessGroups

AFTER_INPUTS = 1  # the order of a finding: other inputs explain more
LEAST_EMPTY = 4  # rows without a gradient that a table of words must have to be known as one
MOST_ROWS = 2**18


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


class Tables:
    """Rows of split embedding tables that the tokens of a step have used."""

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

    def stop(self) -> None:
        """Keep nothing."""
        self.tables, self.begins, self.asked = [], {}, {}

    @torch.no_grad()
    def unmasked(self) -> list[str]:
        """Tables whose rows at the seam have a gradient that no token explains. Collective over the data ranks."""
        if not self.tables or self.groups.size("tp") == 1:
            return []
        nothing = {rows: torch.zeros(rows + 2, dtype=torch.bool, device="cpu") for rows in self.begins}
        asked = {rows: self.asked.get(rows, none).cpu() for rows, none in nothing.items()}
        group = self.groups.control("dp_cp")
        if dist.get_world_size(group) > 1:
            flat = torch.cat([asked[rows] for rows in self.begins]).long()
            found = agree.bounds(flat, group, "the tokens of the first step")[1]
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

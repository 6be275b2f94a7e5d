"""Collect each rank's own and reduced gradient of a wrong parameter for the diagnosis. Collective."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import AXES, GRID_KINDS, axes_of
from core.verify.diagnosis import DATA_AXES, BiasPart, Explanation, RankPart, explain, explain_bias
from core.verify.gathered import Held
from core.verify.job import Job
from core.verify.reference import Expected, Reference

SAMPLE = 65536  # number of elements of a wrong gradient that the diagnosis uses
# Axis names of the diagnosis -> fields of ProcessGroups. Experts have separate data and tensor groups.
DENSE_AXES, EXPERT_AXES = ({axis.label: axis.name for axis in axes_of(expert)} for expert in (False, True))
DENSE_INSTANCES = {"optimizer instances": "inter_dp_cp", "dp inside an instance": "intra_dp_cp"}
EXPERT_INSTANCES = {"optimizer instances": "inter_expt_dp", "expert dp inside an instance": "intra_expt_dp"}


def cause_of_gradient(
    job: Job,
    reference: Reference,
    expected: Expected,
    batch: Any,
    got: dict[tuple[int, str], Tensor],
    wrong: Sequence[str],
) -> Explanation:
    """Find the likely cause of the first wrong gradient, by one more backward without any reduction. Collective."""
    plain = reference.again(batch, auxiliary=0.0) if reference.has_auxiliary else None
    job.backward(batch)
    mine = [held for held in job.model.trained if held.name == wrong[0]]
    part = _part(job, mine, expected, plain, got) if mine else None
    job.clear()
    answers = agree.gather((part, _reductions(job)), None, "the cause").values()
    parts, tables = [part for part, _ in answers], [table for _, table in answers]
    answer: Explanation | None = None
    if dist.get_rank() == 0:  # only rank 0 decides, so that round-off cannot make reports differ
        present = [part for part in parts if part is not None]
        reductions: dict[str, Reductions] = {}
        for table in tables:
            for name, entry in table.items():
                reductions.setdefault(name, entry)
        sizes = next(table[wrong[0]].sizes for table in tables if wrong[0] in table)
        blamed = _blamed(reductions, wrong)
        suspects = _suspects(reductions, wrong, blamed)
        answer = explain(
            present,
            sizes,
            suspects,
            tokens=expected.tokens,
            microbatches=job.microbatches,
        )
        also = ""
        if blamed and len(reductions) > len(set(wrong) & reductions.keys()):
            also = f"; the wrong ones, and no right one, have {' and '.join(map(repr, blamed))}"
        elif blamed:
            also = f"; all parameters are wrong, and all have {' and '.join(map(repr, blamed))}"
        # A missing sum over tp is a fault of a reduction only if the parameter has a reduction over tp.
        named = {axis for axis in sizes if re.search(rf"\b{axis}\b", answer.cause)}
        explains = answer.of_reduction and bool(named & set(suspects) if named else suspects)
        answer = Explanation(answer.cause + also, answer.details, explains)
    decided = agree.gather(answer, None, "the cause")[0]
    assert decided is not None, "rank 0 has explained it"
    return decided


def cause_of_bias(job: Job, batch: Any, name: str, moved: dict[tuple[int, str], Tensor]) -> Explanation:
    """Explain a router's wrong bias from the counts of one more backward. Collective."""
    routers = [
        (held, job.model.chunks[held.chunk].module.get_submodule(held.place.local_name.rpartition(".")[0]))
        for held in job.model.biases
    ]
    for _, router in routers:
        router.local_tokens_per_expert.zero_()
    job.backward(batch)
    job.clear()
    part = None
    for held, router in routers:
        if held.name == name:
            counts: Any = router.local_tokens_per_expert
            place = {axis: job.groups.rank(axis) for axis in GRID_KINDS["tp_dp_cp"][0].split("-")}
            part = BiasPart(dist.get_rank(), place, counts.tolist(), moved[held.key].tolist())
    parts = agree.gather(part, None, "the cause").values()
    rate = job.model.chunks[0].config.moe_router_bias_update_rate
    return Explanation(explain_bias([part for part in parts if part is not None], rate))


def _part(
    job: Job,
    mine: Sequence[Held],
    expected: Expected,
    plain: Expected | None,
    got: dict[tuple[int, str], Tensor],
) -> RankPart:
    """Return this rank's part; replicas in several chunks are summed, with the first one's result."""
    held = mine[0]
    own = [job.model.own_gradient(held).detach().cpu().double().reshape(-1) for held in mine]
    local = torch.stack(own).sum(dim=0) / job.scale
    want = held.slice_of(expected.grads[held.name]).double().reshape(-1)
    auxiliary = None
    if plain is not None:
        auxiliary = want - held.slice_of(plain.grads[held.name]).double().reshape(-1)
    have = got[held.key].cpu().double().reshape(-1)
    chosen = slice(None, None, -(-have.numel() // SAMPLE))
    return RankPart(
        dist.get_rank(),
        {axis: job.groups.rank(field) for axis, field in _axes(job.groups, held).items()},
        local[chosen],
        have[chosen],
        want[chosen],
        job.model.valid_mask(held)[chosen],
        None if auxiliary is None else auxiliary[chosen],
    )


def _axes(groups: ProcessGroups, held: Held) -> dict[str, str]:
    assert held.contract is not None, "only trained parameters are compared"
    if held.contract.is_expert:
        return {**EXPERT_AXES, **(EXPERT_INSTANCES if groups.size("inter_expt_dp") > 1 else {})}
    axes = dict(DENSE_AXES) if groups.dp is not None else {**DENSE_AXES, "dp": "dp_cp"}
    return {**axes, **(DENSE_INSTANCES if groups.size("inter_dp_cp") > 1 else {})}


@dataclass(frozen=True)
class Reductions:
    """Reductions of one parameter's gradient.

    Attributes:
        axes: Each reduction, in the contract's words -> its axes, in the diagnosis's words.
        sizes: Number of ranks along each axis.
    """

    axes: dict[str, frozenset[str]]
    sizes: dict[str, int]


def _reductions(job: Job) -> dict[str, Reductions]:
    """Return the reductions of this rank's trained parameters, by name in the full model."""
    table: dict[str, Reductions] = {}
    labels = {axis.name: axis.label for axis in AXES}
    for held in job.model.trained:
        contract = held.contract
        assert contract is not None, "trained"
        sizes = {axis: job.groups.size(field) for axis, field in _axes(job.groups, held).items()}
        data = {axis for axis in sizes if axis in DATA_AXES and sizes[axis] > 1}
        axes = {contract.reductions[0]: frozenset(data)}
        fields = (*contract.partial_over, *contract.averaged_over)
        for text in contract.rules:
            axes[text] = frozenset(labels.get(f, f) for f in fields if f" over {f} " in text)
        sizes |= {axis: job.groups.size(axis) for axis in ("embd", "pos_embd") if axis in fields}
        table[held.name] = Reductions(axes, sizes)
    return table


def _suspects(table: dict[str, Reductions], wrong: Sequence[str], blamed: Sequence[str]) -> list[str]:
    """Return the axes of the blamed reductions; without any, the axes over which all wrong parameters are reduced."""
    known = [table[name] for name in wrong if name in table]  # a router's bias has no gradient
    if blamed:
        return sorted({axis for entry in known for text in blamed for axis in entry.axes[text]})
    return sorted(set.intersection(*({axis for axes in entry.axes.values() for axis in axes} for entry in known)))


def _blamed(table: dict[str, Reductions], wrong: Sequence[str]) -> list[str]:
    """Return the reductions that all wrong parameters and no right ones have."""
    shared = set.intersection(*(set(table[name].axes) for name in wrong if name in table))
    cleared = {text for name, entry in table.items() if name not in wrong for text in entry.axes}
    return sorted(shared - cleared)

"""From a wrong parameter to what the diagnosis needs: each rank's own gradient and the reduced one. Collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.process_groups import ProcessGroups
from core.verify.diagnosis import BiasPart, RankPart, explain, explain_bias
from core.verify.gathered import Held
from core.verify.job import Job
from core.verify.reference import Expected, Reference

SAMPLE = 65536  # elements of a wrong gradient that the diagnosis looks at
# Words of the diagnosis -> fields of ProcessGroups. Experts have a data group and a tensor group of their own.
DENSE_AXES = {"dp": "dp", "cp": "cp", "tp": "tp", "pp": "pp"}
EXPERT_AXES = {"expert dp": "expt_dp", "ep": "ep", "etp": "expt_tp", "pp": "pp"}
DENSE_INSTANCES = {"optimizer instances": "inter_dp_cp", "dp inside an instance": "intra_dp_cp"}
EXPERT_INSTANCES = {"optimizer instances": "inter_expt_dp", "expert dp inside an instance": "intra_expt_dp"}


def cause_of_gradient(
    job: Job,
    reference: Reference,
    expected: Expected,
    batch: Any,
    got: dict[tuple[int, str], Tensor],
    wrong: Sequence[str],
) -> tuple[str, tuple[str, ...]]:
    """The likely cause of the first wrong gradient, and lines of detail. One more backward, without any reduction."""
    plain = reference.without_auxiliary(batch) if reference.has_auxiliary else None
    job.backward(batch)
    mine = [held for held in job.model.trained if held.name == wrong[0]]
    part = _part(job, mine, expected, plain, got) if mine else None
    job.clear()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, _reductions(job))
    answer: list[Any] = [None]
    if dist.get_rank() == 0:  # one rank's round-off decides, so that all report the same
        present = [part for part in parts if part is not None]
        reductions: dict[str, dict[str, set[str]]] = {}
        for table in tables:
            for name, entry in table.items():
                reductions.setdefault(name, entry)
        sizes = dict(next(table[wrong[0]]["sizes"] for table in tables if wrong[0] in table))
        cause, details = explain(
            present,
            sizes,
            _suspects(reductions, wrong, "axes"),
            tokens=expected.tokens,
            microbatches=job.microbatches,
        )
        blamed = _blamed(reductions, wrong, "reductions")
        if blamed:
            cause += f"; the wrong ones, and no right one, have {' and '.join(map(repr, blamed))}"
        answer[0] = cause, details
    dist.broadcast_object_list(answer, src=0)
    return answer[0][0], answer[0][1]


def cause_of_bias(job: Job, batch: Any, name: str, moved: dict[tuple[int, str], Tensor]) -> tuple[str, tuple[str, ...]]:
    """Why a router's bias moved elsewhere, from the counts of one more backward. moved: by how much, by `Held.key`."""
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
            place = {axis: job.groups.rank(axis) for axis in ("dp", "cp", "tp")}
            part = BiasPart(dist.get_rank(), place, counts.tolist(), moved[held.key].tolist())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    rate = job.model.chunks[0].config.moe_router_bias_update_rate
    return explain_bias([part for part in parts if part is not None], rate), ()


def _part(
    job: Job,
    mine: Sequence[Held],
    expected: Expected,
    plain: Expected | None,
    got: dict[tuple[int, str], Tensor],
) -> RankPart:
    """What this rank has; of copies in several chunks the sum, and the first one's result."""
    locals_ = []
    for held in mine:
        param: Any = held.tensor
        own = param.main_grad if param.grad is None else param.grad
        locals_.append(own.detach().cpu().double().reshape(-1).clone())
    held = mine[0]
    want = held.slice_of(expected.grads[held.name]).double().reshape(-1)
    auxiliary = None
    if plain is not None:
        auxiliary = want - held.slice_of(plain.grads[held.name]).double().reshape(-1)
    have = got[held.key].cpu().double().reshape(-1)
    chosen = slice(None, None, -(-have.numel() // SAMPLE))
    return RankPart(
        dist.get_rank(),
        {axis: job.groups.rank(field) for axis, field in _axes(job.groups, held).items()},
        torch.stack(locals_).sum(dim=0)[chosen],
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


def _reductions(job: Job) -> dict[str, dict[str, Any]]:
    """Whole name -> the axes it is reduced over, in the diagnosis' words, and its reductions in the contract's."""
    table: dict[str, dict[str, Any]] = {}
    for held in job.model.trained:
        contract = held.contract
        assert contract is not None, "trained"
        words = {"expt_tp": "etp", "embd": "embd", "pos_embd": "pos_embd"}
        axes = {"expert dp", "ep"} if contract.is_expert else {"dp", "cp"}
        axes |= {words.get(axis, axis) for axis in (*contract.partial_over, *contract.averaged_over)}
        sizes = {axis: job.groups.size(field) for axis, field in _axes(job.groups, held).items()}
        sizes |= {axis: job.groups.size(axis) for axis in ("embd", "pos_embd") if axis in axes}
        table[held.name] = {
            "axes": {axis for axis in axes if sizes.get(axis, 2) > 1},
            "reductions": set(contract.reductions),
            "sizes": sizes,
        }
    return table


def _suspects(table: dict[str, dict[str, set[str]]], wrong: Sequence[str], what: str) -> list[str]:
    """What all wrong parameters have and no right one; else what all wrong ones have."""
    known = [name for name in wrong if name in table]  # a router's bias has no gradient
    return _blamed(table, wrong, what) or sorted(set.intersection(*(table[name][what] for name in known)))


def _blamed(table: dict[str, dict[str, set[str]]], wrong: Sequence[str], what: str) -> list[str]:
    known = [name for name in wrong if name in table]
    shared = set.intersection(*(table[name][what] for name in known))
    cleared = set().union(*(entry[what] for name, entry in table.items() if name not in wrong))
    return sorted(shared - cleared)

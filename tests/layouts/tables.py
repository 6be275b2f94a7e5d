"""The tables of layouts that the oracle runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.groups.rank_grid import DEFAULT_ORDER
from tests.layouts.covering import Constraint, Covering, cover_pairs
from tests.layouts.layouts import RULES, Layout, Rule

MAX_RANKS = 8

# tp 2 with sequence parallelism, pp 2, dp 2, ep 2, tied, experts in every second layer: 8 ranks.
FULL_HOUSE = Layout(
    dp=2,
    tp=2,
    sp=True,
    pp=2,
    schedule="1F1B",
    ep=2,
    etp=1,
    experts="alltoall",
    aux="aux_loss",
    shared=True,
    microbatches=3,
)

# --- data and tensor parallelism, as wide as they go ------------------------------------------------------------------

BASES = (
    Layout(),
    Layout(dp=2),
    Layout(dp=3),
    Layout(dp=4),
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(dp=2, tp=2),
    Layout(dp=2, tp=2, sp=True),
    Layout(tp=4, sp=True),
    Layout(dp=3, tp=2, sp=True),
    Layout(dp=8),
    Layout(dp=4, tp=2, sp=True),
    Layout(dp=2, tp=4, sp=True),
    Layout(tp=8, sp=True),
)


def _variants(base: Layout) -> Iterator[Layout]:
    """What is tried on each pair of data and tensor parallel sizes."""
    yield base
    deterministic = replace(base, deterministic=True, microbatches=2)
    yield deterministic
    yield replace(deterministic, overlap=True, bucket_size=2000)
    yield replace(deterministic, strategy="optim", bucket_size=2000)
    yield replace(deterministic, strategy="optim", overlap=True, bucket_size=500)
    yield replace(base, strategy="optim", overlap=True, bucket_size=1, microbatches=3, per_token=True)
    yield replace(base, overlap=True, microbatches=3, average=True, bucket_size=700)
    if base.tp <= 4:
        yield replace(base, model="modern", strategy="optim", overlap=True, fusion=True, bucket_size=1000)
        yield replace(base, model="modern", per_token=True, recompute=True, microbatches=2)
    if base.dp % 2 == 0:
        instances = replace(base, strategy="optim", instances=2, overlap=True, bucket_size=900)
        yield instances
        yield replace(instances, overlap=False, per_token=True, microbatches=3)


DENSE = tuple(layout for base in BASES for layout in _variants(base))

# --- each further axis by itself --------------------------------------------------------------------------------------

_ONE_F_ONE_B = Layout(pp=2, schedule="1F1B", microbatches=3)
_EXPERTS = Layout(dp=2, experts="alltoall", aux="aux_loss")
SINGLE = (
    *(Layout(pp=2, schedule=name, microbatches=3) for name in ("GPipe", "1F1B")),
    *(Layout(pp=2, schedule=n, vpp=2, microbatches=4) for n in ("Interleaved1F1B", "InterleavedZeroBubble")),
    *(Layout(pp=2, schedule=name, vpp=2, microbatches=4) for name in ("ZBVZeroBubble", "DualPipeV")),
    Layout(pp=3, schedule="InterleavedZeroBubble", vpp=2, microbatches=6),
    Layout(pp=4, schedule="1F1B", microbatches=5),
    replace(_ONE_F_ONE_B, tied=False),
    replace(_ONE_F_ONE_B, uneven=True, per_token=True),
    replace(_ONE_F_ONE_B, model="tagged"),
    *(Layout(cp=2, cp_comm=kind, per_token=True) for kind in ("p2p", "all_gather", "a2a")),
    Layout(cp=4, cp_comm="p2p", model="modern"),
    _EXPERTS,
    replace(_EXPERTS, ep=2),
    replace(_EXPERTS, dp=4, ep=2, experts="allgather", strategy="optim"),
    replace(_EXPERTS, dp=4, ep=4, aux="global_aux_loss", microbatches=2),
    replace(_EXPERTS, dp=4, ep=2, aux="seq_aux_loss", microbatches=2, instances=2, strategy="optim"),
    replace(_EXPERTS, ep=2, expert_bias=True, shared=True, model="modern"),
    replace(_EXPERTS, dp=1, tp=2, etp=2, model="tagged"),
    replace(_EXPERTS, dp=1, tp=2, etp=1, ep=2),
    replace(_EXPERTS, dp=2, tp=1, etp=2, per_token=True),
)

# --- all pairs --------------------------------------------------------------------------------------------------------

# Values in the order of their price.
AXES: dict[str, tuple[Any, ...]] = {
    "dp": (1, 2, 4),
    "tp": (1, 2),
    "sp": (False, True),
    "pp": (1, 2, 4),
    "schedule": (
        None,
        "1F1B",
        "GPipe",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ),
    "vpp": (1, 2),
    "uneven": (False, True),
    "cp": (1, 2),
    "cp_comm": (None, "p2p", "all_gather", "a2a"),
    "ep": (1, 2),
    "etp": (None, 1, 2),
    "experts": (None, "alltoall", "allgather"),
    "aux": (None, "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "expert_bias": (False, True),
    "shared": (False, True),
    "order": (DEFAULT_ORDER, "tp-cp-pp-ep-dp"),
    "strategy": STRATEGIES,
    "instances": (1, 2),
    "overlap": (False, True),
    "microbatches": (1, 3, 4, 8),
    "per_token": (False, True),
    "average": (False, True),
    "fusion": (False, True),
    "recompute": (False, True),
    "scale_in_optimizer": (False, True),
    "whole_shards": (False, True),
    "every_microbatch": (False, True),
    "overlap_gather": (False, True),
    "model": ("classic", "modern", "tagged"),
    "tied": (True, False),
}


def _allows(rule: Rule) -> Callable[..., bool]:
    return lambda *values: rule.problem(*values) is None


def _fits(dp: int, tp: int, pp: int, cp: int) -> bool:
    return math.prod((dp, tp, pp, cp)) <= MAX_RANKS


@cache
def pairwise() -> tuple[tuple[Layout, ...], Covering]:
    """(layouts that hold every pair of values of AXES that a legal layout of at most 8 ranks can hold, the covering).

    Takes a second or two, so it is made when it is asked for.
    """
    constraints = [Constraint(rule.axes, _allows(rule)) for rule in RULES]
    constraints.append(Constraint(("dp", "tp", "pp", "cp"), _fits))
    covering = cover_pairs(AXES, constraints)
    return tuple(_in_buckets(Layout(**case)) for case in covering.cases), covering


def _in_buckets(layout: Layout) -> Layout:
    return replace(layout, bucket_size=900) if layout.overlap else layout


# --- the tables -------------------------------------------------------------------------------------------------------

QUICK = (
    Layout(),
    Layout(dp=2, overlap=True, bucket_size=700, microbatches=2),
    Layout(dp=3, strategy="optim", per_token=True, microbatches=2),
    Layout(dp=4, strategy="optim", instances=2, overlap=True, bucket_size=500),
    Layout(dp=4, average=True, overlap=True),
    Layout(tp=2),
    Layout(dp=2, tp=2, sp=True, deterministic=True, microbatches=2),
    Layout(dp=2, tp=2, sp=True, deterministic=True, microbatches=2, strategy="optim", overlap=True, bucket_size=500),
    Layout(dp=2, tp=2, sp=True, per_token=True, strategy="optim", overlap=True, bucket_size=900, model="modern"),
    Layout(tp=4, sp=True, fusion=True, recompute=True),
    replace(_ONE_F_ONE_B, model="tagged"),
    Layout(dp=2, pp=2, schedule="InterleavedZeroBubble", vpp=2, microbatches=4, strategy="optim", per_token=True),
    Layout(pp=2, schedule="Interleaved1F1B", vpp=2, microbatches=4, strategy="optim_grads_params", model="tagged"),
    Layout(tp=2, cp=2, cp_comm="p2p", sp=True, per_token=True, model="modern", microbatches=2),
    Layout(dp=2, tp=2, sp=True, etp=2, experts="allgather", aux="seq_aux_loss", microbatches=2, model="tagged"),
    replace(_EXPERTS, dp=4, ep=2, expert_bias=True, shared=True, microbatches=2, strategy="optim", per_token=True),
    replace(_EXPERTS, cp=2, cp_comm="all_gather", ep=2, microbatches=2),
    Layout(tp=2, sp=True, cp=2, cp_comm="a2a", etp=2, experts="alltoall", shared=True),
    Layout(tp=2, sp=True, pp=2, schedule="ZBVZeroBubble", vpp=2, microbatches=4),
    replace(FULL_HOUSE, strategy="optim", overlap=True, bucket_size=2000),
)
HOUSES = (
    FULL_HOUSE,
    replace(FULL_HOUSE, strategy="optim", overlap=True, bucket_size=900, per_token=True),
    replace(FULL_HOUSE, etp=2, ep=1, expert_bias=True, tied=False),
    replace(FULL_HOUSE, schedule="InterleavedZeroBubble", vpp=2, microbatches=4, order="tp-cp-pp-ep-dp", etp=2),
    replace(FULL_HOUSE, model="tagged", etp=2, microbatches=4, schedule="Interleaved1F1B", vpp=2, strategy="optim"),
    replace(FULL_HOUSE, dp=1, cp=2, cp_comm="p2p", aux="global_aux_loss"),
    replace(
        FULL_HOUSE,
        dp=1,
        cp=2,
        cp_comm="a2a",
        per_token=True,
        model="modern",
        schedule="ZBVZeroBubble",
        vpp=2,
        microbatches=4,
    ),
)
TRAINED = (
    Layout(dp=2, overlap=True, bucket_size=900, microbatches=2),
    Layout(dp=2, tp=2, sp=True, strategy="optim", overlap=True, bucket_size=900, model="modern"),
    Layout(dp=4, strategy="optim", instances=2, per_token=True, microbatches=2),
    Layout(dp=2, pp=2, schedule="InterleavedZeroBubble", vpp=2, microbatches=4, strategy="optim"),
    Layout(pp=2, schedule="Interleaved1F1B", vpp=2, microbatches=4, model="tagged"),
    Layout(tp=2, cp=2, cp_comm="p2p", sp=True, per_token=True, microbatches=2),
    replace(_EXPERTS, dp=4, ep=2, expert_bias=True, shared=True, strategy="optim"),
    Layout(dp=3, strategy="optim_grads", microbatches=2, every_microbatch=True, overlap_gather=True, per_token=True),
    Layout(dp=2, tp=2, strategy="optim_grads", scale_in_optimizer=True, whole_shards=True, overlap_gather=True),
    FULL_HOUSE,
    replace(FULL_HOUSE, strategy="optim_grads", overlap=True, bucket_size=900, per_token=True, overlap_gather=True),
    Layout(dp=3, strategy="optim_grads_params", microbatches=2, every_microbatch=True, bucket_size=900),
    replace(FULL_HOUSE, strategy="optim_grads_params", overlap=True, bucket_size=900, recompute=True),
)


def tables() -> dict[str, Callable[[], dict[str, tuple[Layout, ...]]]]:
    """Name -> its layouts, in groups with a heading."""
    return {
        "quick": lambda: {"a selection": QUICK},
        "single": lambda: {"each axis alone": SINGLE},
        "pairs": lambda: {"all pairs of axis values": pairwise()[0]},
        "houses": lambda: {"the full house": HOUSES},
        "full": lambda: {
            "data and tensor parallelism": DENSE,
            "each axis alone": SINGLE,
            "all pairs of axis values": pairwise()[0],
            "the full house": HOUSES,
        },
        "training": lambda: {"training, step by step": TRAINED},
    }

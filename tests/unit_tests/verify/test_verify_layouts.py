"""Which layouts are legal, and tables that hold what they promise: all without a process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.pipeline_parallel import SCHEDULES
from tests.layouts.covering import Constraint, cover_pairs, pairs_of_axes, pairs_of_case
from tests.layouts.layouts import MODELS, Layout
from tests.layouts.tables import AXES, DENSE, FULL_HOUSE, HOUSES, MAX_RANKS, QUICK, SINGLE, TRAINED, pairwise, tables

# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(sp=True), "sp=True without tp"),
        (Layout(pp=2), "pp 2 and schedule None"),
        (Layout(schedule="1F1B"), "pp 1 and schedule '1F1B'"),
        (Layout(pp=2, schedule="1F1B", microbatches=1), "1 microbatches do not fit schedule 1F1B"),
        (Layout(pp=2, schedule="1F1B", vpp=2, microbatches=4), "1F1B runs one stage a rank"),
        (Layout(pp=2, schedule="DualPipeV", microbatches=4), "placement 'v' has 2 stages a rank"),
        (Layout(vpp=2), "vpp and uneven are of a pipeline"),
        (Layout(cp=2), "cp 2 needs cp_comm"),
        (Layout(cp_comm="p2p"), "nothing is exchanged"),
        (Layout(cp=3, cp_comm="p2p"), "sequence length 8 is not divisible"),
        (Layout(tp=4, cp=2, cp_comm="a2a", model="modern"), "heads do not divide over cp 2"),
        (Layout(dp=2, ep=2), "ep=2 without experts"),
        (Layout(aux="aux_loss"), "without experts"),
        (Layout(dp=3, ep=3, experts="alltoall"), "4 experts of 24 channels, ep 3"),
        (Layout(dp=2, ep=4, experts="alltoall"), "is not divisible"),
        (Layout(tp=8, experts="alltoall", model="modern"), "heads of keys and values"),
        (Layout(dp=2, instances=2), "nothing is sharded"),
        (Layout(dp=2, tp=2, strategy="optim", instances=4), "is not divisible by num_distributed_optimizer_instances"),
        (Layout(per_token=True, average=True), "a sum over tokens is not averaged"),
        (Layout(pp=2, schedule="ZBVZeroBubble", vpp=2, microbatches=4, model="tagged"), "share a rank"),
        (
            Layout(dp=2, cp=2, cp_comm="p2p", pp=2, schedule="GPipe", order="tp-cp-pp-ep-dp"),
            "2 ranks apart in the dense grid",
        ),
        (Layout(dp=2, cp=2, cp_comm="p2p", pp=2, schedule="GPipe"), None),
        (FULL_HOUSE, None),
    ],
    ids=str,
)
def test_what_cannot_run_is_distinguished_from_what_can(layout: Layout, words: str | None) -> None:
    if words is None:
        assert layout.problem is None
    else:
        assert layout.problem is not None and words in layout.problem


def test_the_full_house_is_what_the_word_promises() -> None:
    house = FULL_HOUSE
    assert (house.tp, house.sp, house.pp, house.dp, house.ep, house.world) == (2, True, 2, 2, 2, 8)
    assert house.shares_embedding and house.experts and house.num_layers == 4


def test_uneven_stages_leave_the_first_one_fewer_layers() -> None:
    pipeline = Layout(pp=2, schedule="Interleaved1F1B", vpp=2, uneven=True, microbatches=4).pipeline
    assert pipeline is not None and pipeline.layers_per_stage == (0, 2, 1, 1)


def test_every_layout_of_every_table_is_legal_and_has_its_own_line() -> None:
    for name, groups in tables().items():
        layouts = [layout for group in groups().values() for layout in group]
        assert layouts, name
        assert not [f"{layout}: {layout.problem}" for layout in layouts if layout.problem or layout.world > MAX_RANKS]
    assert len({str(layout) for layout in DENSE}) == len(set(DENSE)) == len(DENSE)
    everything = {*DENSE, *SINGLE, *HOUSES, *QUICK, *TRAINED, *pairwise()[0]}
    assert len({str(layout) for layout in everything}) == len(everything), "two layouts have one line"


def test_tables_cover_what_they_promise() -> None:
    assert {layout.world for layout in DENSE} >= {1, 2, 3, 4, 6, 8}
    for field in ("sp", "overlap", "per_token", "average", "fusion", "recompute", "deterministic"):
        assert {getattr(layout, field) for layout in DENSE} == {False, True}, field
    assert {layout.schedule for layout in SINGLE} - {None} == set(SCHEDULES)
    assert {layout.cp_comm for layout in SINGLE} - {None} == {"p2p", "all_gather", "a2a"}
    assert {layout.aux for layout in SINGLE} - {None} == {"aux_loss", "seq_aux_loss", "global_aux_loss"}
    assert set(AXES["strategy"]) == set(STRATEGIES) and set(AXES["model"]) == set(MODELS)
    assert FULL_HOUSE in HOUSES and FULL_HOUSE in TRAINED
    assert {layout.world for layout in QUICK} == {1, 2, 3, 4, 8}


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_every_pair_that_a_legal_layout_can_hold_is_held_by_one() -> None:
    layouts, covering = pairwise()
    held = {pair for case in covering.cases for pair in pairs_of_case(AXES, case)}
    assert held | covering.impossible == set(pairs_of_axes(AXES)) and not held & covering.impossible
    assert len(layouts) < 80, "generated to be few"
    for layout, case in zip(layouts, covering.cases, strict=True):
        assert layout.problem is None and layout.world <= MAX_RANKS
        assert all(getattr(layout, axis) == value for axis, value in case.items())


def test_pairs_that_are_called_impossible_are_in_no_legal_layout() -> None:
    """Asked of legal layouts found in another way: random ones, mended value by value."""
    impossible = pairwise()[1].impossible
    assert {first for first, *_ in impossible} and len(impossible) < 60
    draw = random.Random(4)
    found = 0
    for _ in range(30_000):
        case = {axis: values[0] for axis, values in AXES.items()}
        for axis in draw.sample(list(AXES), 8):
            case[axis] = draw.choice(AXES[axis])
        layout = Layout(**case)
        if layout.problem is None and layout.world <= MAX_RANKS:
            found += 1
            assert not impossible & set(pairs_of_case(AXES, case)), layout
    assert found > 200


def test_a_covering_is_the_same_at_every_call() -> None:
    first = pairwise()[0]
    pairwise.cache_clear()
    assert pairwise()[0] == first


SMALL: dict[str, Sequence[Any]] = {"a": (0, 1, 2), "b": (0, 1), "c": ("x", "y"), "d": (None, 1, 2)}


def small_constraints() -> list[Constraint]:
    """Two that bite by themselves, and one that only together with the others forbids a pair: a 2 with c 'y'."""
    return [
        Constraint(("a", "b"), lambda a, b: a < 2 or b == 1),
        Constraint(("b", "c", "d"), lambda b, c, d: b == 0 or c == "x" or d == 3),
        Constraint(("d",), lambda d: d != 2),
    ]


def test_a_small_covering_agrees_with_trying_everything() -> None:
    constraints = small_constraints()
    legal = []
    for values in itertools.product(*SMALL.values()):
        case = dict(zip(SMALL, values, strict=True))
        if all(c.allows(*(case[axis] for axis in c.axes)) for c in constraints):
            legal.append(case)
    possible = {pair for case in legal for pair in pairs_of_case(SMALL, case)}

    covering = cover_pairs(SMALL, constraints)

    assert all(case in legal for case in covering.cases)
    assert {pair for case in covering.cases for pair in pairs_of_case(SMALL, case)} == possible
    assert covering.impossible == set(pairs_of_axes(SMALL)) - possible
    assert ("a", 2, "c", "y") in covering.impossible
    assert len(covering.cases) < len(legal)


def test_what_runs_anyway_is_not_covered_again() -> None:
    constraints = small_constraints()
    whole = cover_pairs(SMALL, constraints)
    rest = cover_pairs(SMALL, constraints, given=whole.cases[:3])
    covered = {pair for case in (*whole.cases[:3], *rest.cases) for pair in pairs_of_case(SMALL, case)}
    assert covered | rest.impossible == set(pairs_of_axes(SMALL)) and len(rest.cases) < len(whole.cases)


def test_a_constraint_on_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"constraints read \['z'\], which are no axes; the axes are a, b, c, d"):
        cover_pairs(SMALL, [Constraint(("a", "z"), lambda a, z: True)])

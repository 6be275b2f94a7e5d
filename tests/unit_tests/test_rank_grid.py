"""The rank grid against a naive enumeration of every rank's coordinates."""

import itertools
import subprocess
import sys
import time

import pytest

from core.groups.rank_grid import (
    ACTIVATION_KINDS,
    COPY_AXES,
    DEFAULT_ORDER,
    GRADIENT_KINDS,
    MODEL_AXES,
    STAGE_CROSSING,
    RankGrid,
    group_ranks,
    parse_tokens,
)

ORDERS = [DEFAULT_ORDER, "tp-cp-dp-ep-pp", "dp-tp-cp-ep-pp", "tp-cp-pp-ep-dp", "pp-dp-ep-cp-tp"]
TOKEN_SETS = ["tp", "cp", "ep", "dp", "pp", "dp-tp", "tp-pp", "dp-cp", "tp-dp-cp", "tp-ep-pp", "pp-dp-cp-ep-tp"]


def naive_groups(sizes: dict[str, int], order: str, tokens: str) -> list[list[int]]:
    """Write down every rank's coordinates by counting, then put together the ranks that differ only in `tokens`."""
    axes = order.split("-")
    groups: dict[tuple[int, ...], list[int]] = {}
    # product() counts its last factor fastest, and the leftmost token of an order is the fastest.
    for rank, digits in enumerate(itertools.product(*(range(sizes[axis]) for axis in reversed(axes)))):
        place = dict(zip(reversed(axes), digits, strict=True))
        fixed = tuple(place[axis] for axis in axes if axis not in tokens.split("-"))
        groups.setdefault(fixed, []).append(rank)
    return sorted(groups.values())


def layouts(worlds=(1, 2, 6, 8, 12, 16)):
    for world in worlds:
        divisors = [size for size in range(1, world + 1) if world % size == 0 and size <= 4]
        for tp, pp, cp, ep in itertools.product(divisors, repeat=4):
            for expt_tp in {1, tp}:
                if world % (tp * pp * cp) == 0 and world % (expt_tp * ep * pp) == 0:
                    yield world, tp, pp, cp, ep, expt_tp


@pytest.mark.parametrize("order", ORDERS)
def test_groups_are_those_of_a_naive_enumeration(order):
    compared = refused = 0
    for world, tp, pp, cp, ep, expt_tp in layouts():
        dense = {"tp": tp, "cp": cp, "ep": 1, "dp": world // (tp * cp * pp), "pp": pp}
        expert = {"tp": expt_tp, "cp": 1, "ep": ep, "dp": world // (expt_tp * ep * pp), "pp": pp}
        if naive_groups(dense, order, "pp") != naive_groups(expert, order, "pp"):
            with pytest.raises(RuntimeError, match="same pipeline groups"):
                RankGrid(world, tp=tp, pp=pp, cp=cp, ep=ep, expt_tp=expt_tp, order=order)
            refused += 1
            continue
        grid = RankGrid(world, tp=tp, pp=pp, cp=cp, ep=ep, expt_tp=expt_tp, order=order)
        for tokens in TOKEN_SETS:
            assert grid.groups(tokens) == naive_groups(dense, order, tokens), (grid, tokens)
            assert grid.groups(tokens, expert=True) == naive_groups(expert, order, tokens), (grid, tokens)
        compared += 1
    assert compared > 100
    assert refused > 0 or order.endswith("pp") or order.startswith("pp")


@pytest.mark.parametrize("order", ORDERS)
def test_group_of_a_rank_is_the_one_that_contains_it(order):
    for world, tp, pp, cp, ep, expt_tp in layouts((8,)):
        try:
            grid = RankGrid(world, tp=tp, pp=pp, cp=cp, ep=ep, expt_tp=expt_tp, order=order)
        except RuntimeError:
            continue
        for tokens, expert, rank in itertools.product(TOKEN_SETS, (False, True), range(world)):
            (group,) = (group for group in grid.groups(tokens, expert) if rank in group)
            assert grid.group_of(rank, tokens, expert) == group
            if tokens in ("tp", "cp", "ep", "dp", "pp"):
                assert group[grid.coordinate(rank, tokens, expert)] == rank


def test_sixteen_ranks_by_hand():
    grid = RankGrid(16, tp=2, pp=4)
    assert grid.dp == 2
    assert grid.groups("tp")[:2] == [[0, 1], [2, 3]]
    assert grid.groups("dp")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert grid.groups("pp")[:2] == [[0, 4, 8, 12], [1, 5, 9, 13]]


def test_expert_grid_by_hand():
    grid = RankGrid(8, tp=2, ep=2, expt_tp=1)
    assert (grid.dp, grid.expt_dp) == (4, 4)
    assert grid.groups("ep", expert=True) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("dp", expert=True) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_expert_tensor_size_is_the_tensor_size_by_default():
    assert RankGrid(8, tp=4).expt_tp == 4


def test_group_of_costs_the_size_of_the_group_and_not_of_the_world():
    grid = RankGrid(2**40, tp=8, pp=2**29)
    started = time.perf_counter()
    for _ in range(1000):
        assert grid.group_of(2**40 - 1, "tp") == list(range(2**40 - 8, 2**40))
    assert time.perf_counter() - started < 10.0


def test_the_grid_does_not_import_torch():
    code = "import sys, core.groups.rank_grid; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_axes_of_size_one_may_be_left_out_of_the_order():
    assert RankGrid(8, tp=2, pp=2, order="tp-dp-pp").groups("dp") == RankGrid(8, tp=2, pp=2).groups("dp")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world_size": 6, "tp": 4}, RuntimeError, r"world_size \(6\) is not divisible by 4 = tensor \(4\) x context"),
        ({"world_size": 8, "tp": 2, "cp": 3}, RuntimeError, r"is not divisible by 6 = .* x context \(3\)"),
        (
            {"world_size": 8, "ep": 3},
            RuntimeError,
            r"world_size \(8\) is not divisible by expert_tensor_model_pipeline_parallel size \(3\)",
        ),
        ({"world_size": 8, "tp": 0}, ValueError, "tp must be an integer of at least 1, got 0"),
        ({"world_size": 8, "pp": 2.0}, ValueError, "pp must be an integer of at least 1, got 2.0"),
        ({"world_size": 8, "cp": True}, ValueError, "cp must be an integer of at least 1, got True"),
        ({"world_size": 0}, ValueError, "world_size must be an integer"),
        ({"world_size": 8, "order": "tp-dp-dp"}, ValueError, "names 'dp' 2 times"),
        ({"world_size": 8, "order": "tp-xp-dp"}, ValueError, "unknown token 'xp'"),
        ({"world_size": 8, "order": "tpdp"}, ValueError, "unknown token 'tpdp'"),
        ({"world_size": 8, "order": ""}, ValueError, "unknown token ''"),
        (
            {"world_size": 8, "tp": 2, "order": "cp-ep-dp-pp"},
            RuntimeError,
            r"The size of \(tp\) is \(2\), but you haven't specified the order \(cp-ep-dp-pp\)",
        ),
        ({"world_size": 8, "expt_tp": 2, "order": "cp-ep-dp-pp"}, RuntimeError, r"The size of \(tp\) is \(2\)"),
        ({"world_size": 8, "ep": 2, "order": "tp-dp"}, RuntimeError, r"The size of \(ep\) is \(2\)"),
        ({"world_size": 8, "order": "tp-pp"}, RuntimeError, r"The size of \(dp\) is \(8\)"),
        (
            {"world_size": 8, "tp": 1, "cp": 2, "pp": 2, "order": "tp-cp-pp-ep-dp"},
            RuntimeError,
            r"2 ranks apart in the dense grid and 1 in the expert grid \(sizes .*'cp': 2",
        ),
    ],
)
def test_sizes_that_do_not_come_out_are_refused_with_the_arithmetic(arguments, error, message):
    with pytest.raises(error, match=message):
        RankGrid(**arguments)


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(ValueError, match=r"rank 8 is not in a world of 8 ranks \(0 to 7\)"):
        RankGrid(8).group_of(8, "tp")


def test_a_size_that_is_no_axis_is_refused_by_name():
    with pytest.raises(TypeError, match=r"unknown sizes \['etp'\]; the axes are tp, expt_tp, cp, ep, pp"):
        RankGrid(8, etp=2)
    with pytest.raises(AttributeError, match="a RankGrid has no 'etp'; its sizes are tp, expt_tp, cp, ep, pp, dp"):
        RankGrid(8).etp  # noqa: B018


def test_the_kinds_that_follow_from_the_table():
    assert DEFAULT_ORDER == "tp-cp-ep-dp-pp"
    assert {"pp", "embd", "pos_embd", "mp", "tp_ep_pp"} == STAGE_CROSSING
    assert {"tp", "pp", "mp", "cp", "tp_cp", "ep", "expt_tp", "tp_ep", "tp_ep_pp"} == ACTIVATION_KINDS
    halves = {f"{half}_{kind}" for half in ("intra", "inter") for kind in ("dp_cp", "expt_dp", "dist_opt")}
    assert {"dp", "dp_cp", "expt_dp"} | halves == GRADIENT_KINDS
    assert (MODEL_AXES, COPY_AXES) == (("tp", "pp"), ("tp", "expt_tp"))


def test_tokens_are_parsed_and_not_searched():
    assert parse_tokens("TP-dp") == ("tp", "dp")
    with pytest.raises(ValueError, match="unknown token 'tp_dp'"):
        parse_tokens("tp_dp")


# --- the groups of one rank -------------------------------------------------------------------------------------------


def naive_instances(grid: RankGrid, count: int, expert: bool) -> list[list[int]]:
    """The ranks of every optimizer instance, by looking at each rank's place in its data group."""
    instances: list[list[int]] = [[] for _ in range(count)]
    for group in grid.groups("dp" if expert else "dp-cp", expert):
        for place, rank in enumerate(group):
            instances[place * count // len(group)].append(rank)
    return [sorted(instance) for instance in instances]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.in_suite()
def test_optimizer_instances_slice_the_data_groups(order, count):
    compared = 0
    for layout in layouts((8, 12)):
        try:
            grid = RankGrid(
                layout[0], order=order, **dict(zip(("tp", "pp", "cp", "ep", "expt_tp"), layout[1:], strict=True))
            )
        except RuntimeError:
            continue
        if grid.dp * grid.cp % count or grid.expt_dp % count:
            with pytest.raises(RuntimeError, match="should be divisible by partial DistOpt shard factor"):
                group_ranks(grid, 0, num_instances=count)
            continue
        instances = naive_instances(grid, count, expert=True)
        if naive_instances(grid, count, expert=False) != instances:
            for rank in range(grid.world_size):
                with pytest.raises(RuntimeError, match="put different ranks into the instance"):
                    group_ranks(grid, rank, num_instances=count)
            continue
        for rank in range(grid.world_size):
            members = group_ranks(grid, rank, num_instances=count)
            (mine,) = (instance for instance in instances if rank in instance)
            assert members["intra_dist_opt"] == mine
            assert members["inter_dist_opt"] == members["inter_expt_dp"]
            for kind in ("dp_cp", "expt_dp"):
                assert members[f"intra_{kind}"] == sorted(set(members[kind]) & set(mine))
                place = members[f"intra_{kind}"].index(rank)
                slices = [sorted(set(members[kind]) & set(instance)) for instance in instances]
                assert members[f"inter_{kind}"] == sorted(piece[place] for piece in slices)
        compared += 1
    assert compared > 10


def test_every_rank_goes_through_the_kinds_in_the_same_order():
    grid = RankGrid(16, tp=2, pp=4, ep=2)
    complete = list(group_ranks(grid, 0))
    assert len(complete) == 22
    for rank in range(16):
        kinds = list(group_ranks(grid, rank))
        assert kinds == [kind for kind in complete if kind in kinds]


def test_embedding_rules_choose_ranks_of_the_pipeline_group():
    grid = RankGrid(8, pp=4)
    assert group_ranks(grid, 0)["embd"] == [0, 6]
    assert "embd" not in group_ranks(grid, 2)
    assert group_ranks(grid, 0)["pos_embd"] == [0]
    assert "pos_embd" not in group_ranks(grid, 6)
    members = group_ranks(grid, 3, embedding_ranks=lambda ranks: ranks[::-1][:3], position_embedding_ranks=sorted)
    assert members["embd"] == [3, 5, 7]
    assert members["pos_embd"] == [1, 3, 5, 7]


@pytest.mark.parametrize("chosen", [[0, 1], [0, 0]])
def test_an_embedding_rule_that_leaves_its_pipeline_is_refused(chosen):
    with pytest.raises(ValueError, match=r"'embd' group returned .* for the pipeline group \[0, 2, 4, 6\]"):
        group_ranks(RankGrid(8, pp=4), 0, embedding_ranks=lambda ranks: chosen)


def test_instance_counts_that_do_not_divide_are_refused_with_the_arithmetic():
    with pytest.raises(
        RuntimeError, match=r"Data parallel size .* the size 4 of group 'dp_cp' \(world 8, sizes \{'tp': 2"
    ):
        group_ranks(RankGrid(8, tp=2), 0, num_instances=3)
    with pytest.raises(
        RuntimeError, match=r"Expert data parallel size .* the size 1 of group 'expt_dp' .*'expt_tp': 2, .*'ep': 4"
    ):
        group_ranks(RankGrid(8, tp=2, ep=4), 0, num_instances=2)
    with pytest.raises(ValueError, match="num_distributed_optimizer_instances must be at least 1, got 0"):
        group_ranks(RankGrid(8), 0, num_instances=0)

"""Every accessor of parallel_state on real gloo ranks, against values counted in an independent way."""

import inspect
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from core import parallel_state
from core.groups.process_groups import FIELDS, ProcessGroups
from tests.unit_tests.ranks import ranks

TP, PP, CP, EP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
LAYOUTS = [
    {},
    {TP: 2},
    {PP: 2, EP: 2},
    {TP: 2, CP: 2, PP: 2},
    {TP: 2, PP: 2, EP: 2, "expert_tensor_parallel_size": 1},
    {CP: 2, EP: 4, "num_distributed_optimizer_instances": 2},
    {TP: 2, EP: 2, "num_distributed_optimizer_instances": 2},
    {PP: 2, EP: 2, CP: 2, TP: 2, "order": "tp-cp-ep-dp-pp"},
    {TP: 2, PP: 2, EP: 2, "order": "tp-cp-pp-ep-dp"},
]


class Places:
    """Coordinates of all ranks by counting, and from them the ranks that agree with one rank on some axes."""

    def __init__(self, world: int, layout: dict) -> None:
        order = layout.get("order", "tp-cp-ep-dp-pp").split("-")
        tp, pp, cp, ep = (layout.get(name, 1) for name in (TP, PP, CP, EP))
        expt_tp = layout.get("expert_tensor_parallel_size", tp)
        dense = {"tp": tp, "cp": cp, "ep": 1, "dp": world // (tp * cp * pp), "pp": pp}
        expert = {"tp": expt_tp, "cp": 1, "ep": ep, "dp": world // (expt_tp * ep * pp), "pp": pp}
        self.sizes = {False: dense, True: expert}
        self.places = {
            key: [self.count(rank, order, sizes) for rank in range(world)] for key, sizes in self.sizes.items()
        }

    @staticmethod
    def count(rank: int, order: list[str], sizes: dict[str, int]) -> dict[str, int]:
        place = {}
        for axis in order:
            rank, place[axis] = divmod(rank, sizes[axis])
        return place

    def together(self, rank: int, axes: str, expert: bool = False) -> list[int]:
        """The ranks whose coordinates differ from those of `rank` in `axes` at most."""
        places, free = self.places[expert], axes.split()
        return [
            other
            for other, place in enumerate(places)
            if all(place[axis] == places[rank][axis] for axis in place if axis not in free)
        ]


def ranks_of(group) -> list[int]:
    return dist.get_process_group_ranks(group)


@ranks(8, timeout_s=120)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())) or "dp")
def test_every_group_accessor_gives_the_ranks_of_its_meaning(rank: int, world: int, layout: dict) -> None:
    parallel_state.initialize_model_parallel(**layout)
    at = Places(world, layout)
    state = parallel_state
    expected = [
        (state.get_model_parallel_group(), at.together(rank, "tp pp")),
        (state.get_tensor_model_parallel_group(), at.together(rank, "tp")),
        (state.get_pipeline_model_parallel_group(), at.together(rank, "pp")),
        (state.get_context_parallel_group(), at.together(rank, "cp")),
        (state.get_data_parallel_group(), at.together(rank, "dp")),
        (state.get_data_parallel_group(with_context_parallel=True), at.together(rank, "dp cp")),
        (state.get_data_parallel_group_gloo(), at.together(rank, "dp")),
        (state.get_data_parallel_group_gloo(with_context_parallel=True), at.together(rank, "dp cp")),
        (state.get_tensor_and_data_parallel_group(), at.together(rank, "tp dp")),
        (state.get_tensor_and_data_parallel_group(with_context_parallel=True), at.together(rank, "tp dp cp")),
        (state.get_tensor_and_context_parallel_group(), at.together(rank, "tp cp")),
        (state.get_amax_reduction_group(), at.together(rank, "tp dp")),
        (state.get_amax_reduction_group(with_context_parallel=True), at.together(rank, "tp dp cp")),
        (state.get_amax_reduction_group(tp_only_amax_red=True), at.together(rank, "tp")),
        (state.get_amax_reduction_group(True, tp_only_amax_red=True), at.together(rank, "tp cp")),
        (state.get_expert_model_parallel_group(), at.together(rank, "ep", True)),
        (state.get_expert_tensor_parallel_group(), at.together(rank, "tp", True)),
        (state.get_expert_tensor_and_model_parallel_group(), at.together(rank, "tp ep", True)),
        (state.get_expert_tensor_model_pipeline_parallel_group(), at.together(rank, "tp ep pp", True)),
        (state.get_expert_data_parallel_group(), at.together(rank, "dp", True)),
        (state.get_expert_data_parallel_group_gloo(), at.together(rank, "dp", True)),
    ]
    for place, (group, members) in enumerate(expected):
        assert ranks_of(group) == members, place
        value = torch.tensor([2.0**rank])
        dist.all_reduce(value, group=group)
        assert value.item() == sum(2.0**member for member in members), place


@ranks(8, timeout_s=120)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())) or "dp")
def test_every_size_and_rank_accessor_gives_the_place_on_its_axis(rank: int, world: int, layout: dict) -> None:
    parallel_state.initialize_model_parallel(**layout)
    at = Places(world, layout)
    state = parallel_state
    (dense, expert), (here, here_expert) = at.sizes.values(), (at.places[key][rank] for key in (False, True))
    assert state.get_tensor_model_parallel_world_size() == dense["tp"]
    assert state.get_tensor_model_parallel_rank() == here["tp"]
    assert state.get_pipeline_model_parallel_world_size() == dense["pp"]
    assert state.get_pipeline_model_parallel_rank() == here["pp"]
    assert state.get_context_parallel_world_size() == dense["cp"]
    assert state.get_context_parallel_rank() == here["cp"]
    assert state.get_data_parallel_world_size() == dense["dp"]
    assert state.get_data_parallel_rank() == here["dp"]
    assert state.get_data_parallel_world_size(with_context_parallel=True) == dense["dp"] * dense["cp"]
    assert state.get_data_parallel_rank(with_context_parallel=True) == here["dp"] * dense["cp"] + here["cp"]
    assert state.get_tensor_and_context_parallel_world_size() == dense["tp"] * dense["cp"]
    assert state.get_tensor_and_context_parallel_rank() == here["cp"] * dense["tp"] + here["tp"]
    assert state.get_expert_model_parallel_world_size() == expert["ep"]
    assert state.get_expert_model_parallel_rank() == here_expert["ep"]
    assert state.get_expert_tensor_parallel_world_size() == expert["tp"]
    assert state.get_expert_tensor_parallel_rank() == here_expert["tp"]
    assert state.get_expert_tensor_and_model_parallel_world_size() == expert["tp"] * expert["ep"]
    assert state.get_expert_tensor_and_model_parallel_rank() == here_expert["ep"] * expert["tp"] + here_expert["tp"]
    assert state.get_expert_data_parallel_world_size() == expert["dp"]
    assert state.get_expert_data_parallel_rank() == here_expert["dp"]
    assert state.get_all_ranks() == "_".join(
        map(str, (here["tp"], here["dp"], here["cp"], here["pp"], here_expert["ep"]))
    )
    assert state.get_rank_grid().world_size == world

    pipeline = at.together(rank, "pp")
    stage = pipeline.index(rank)
    assert state.get_pipeline_model_parallel_first_rank() == pipeline[0]
    assert state.get_pipeline_model_parallel_last_rank() == pipeline[-1]
    assert state.get_pipeline_model_parallel_next_rank() == pipeline[(stage + 1) % len(pipeline)]
    assert state.get_pipeline_model_parallel_prev_rank() == pipeline[stage - 1]
    assert state.is_pipeline_first_stage() == (stage == 0)
    assert state.is_pipeline_last_stage() == (stage == len(pipeline) - 1)
    assert state.get_tensor_model_parallel_src_rank() == min(at.together(rank, "tp"))
    assert state.get_model_parallel_src_rank() == min(at.together(rank, "tp pp"))
    assert state.get_data_parallel_src_rank() == min(at.together(rank, "dp"))
    assert state.get_data_parallel_src_rank(with_context_parallel=True) == min(at.together(rank, "dp cp"))
    assert state.get_expert_model_parallel_src_rank() == min(at.together(rank, "ep", True))
    assert state.get_context_parallel_global_ranks() == at.together(rank, "cp")


@ranks(8)
def test_optimizer_instances_by_hand(rank: int) -> None:
    # tp 2, so dp_cp is 4: [0, 2, 4, 6] on even ranks. ep 2, so expt_dp is 2: [0, 4], [1, 5], ...
    parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2, num_distributed_optimizer_instances=2)
    half = [0, 1, 2, 3] if rank < 4 else [4, 5, 6, 7]
    state = parallel_state
    assert ranks_of(state.get_intra_distributed_optimizer_instance_group()) == half
    assert ranks_of(state.get_inter_distributed_optimizer_instance_group()) == [rank % 4, rank % 4 + 4]
    intra = [member for member in half if member % 2 == rank % 2]
    assert ranks_of(state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)) == intra
    assert ranks_of(state.get_data_parallel_group_gloo(True, True)) == intra
    assert state.get_data_parallel_world_size(with_context_parallel=True, partial_data_parallel=True) == 2
    assert state.get_data_parallel_rank(True, True) == intra.index(rank)
    assert ranks_of(state.get_inter_partial_data_parallel_group()) == [rank % 4, rank % 4 + 4]
    assert ranks_of(state.get_expert_data_parallel_group(partial_expert_data_parallel=True)) == [rank]
    assert ranks_of(state.get_expert_data_parallel_group_gloo(partial_expert_data_parallel=True)) == [rank]
    assert state.get_expert_data_parallel_world_size(partial_expert_data_parallel=True) == 1
    assert state.get_expert_data_parallel_rank(partial_expert_data_parallel=True) == 0
    assert ranks_of(state.get_inter_partial_expert_data_parallel_group()) == [rank % 4, rank % 4 + 4]
    with pytest.raises(ValueError, match="needs with_context_parallel=True"):
        state.get_data_parallel_group(partial_data_parallel=True)


@ranks(2)
def test_one_optimizer_instance_is_everybody(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    groups = parallel_state.get_process_groups()
    assert groups.ranks("intra_dist_opt") == [0, 1]
    assert groups.intra_dp_cp is groups.dp_cp
    assert groups.intra_expt_dp is groups.expt_dp
    assert [groups.size(name) for name in ("inter_dp_cp", "inter_expt_dp", "inter_dist_opt")] == [1, 1, 1]


# --- embedding groups and virtual stages ------------------------------------------------------------------------------


@ranks(4)
def test_the_stages_of_a_pipeline_form_a_ring(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    assert parallel_state.get_pipeline_model_parallel_next_rank() == [1, 2, 3, 0][rank]
    assert parallel_state.get_pipeline_model_parallel_prev_rank() == [3, 0, 1, 2][rank]
    assert parallel_state.is_pipeline_first_stage() == (rank == 0)
    assert parallel_state.is_pipeline_last_stage() == (rank == 3)


@ranks(4)
def test_embedding_groups_belong_to_their_stages_only(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    state = parallel_state
    assert state.is_rank_in_embedding_group() == (rank in (0, 3))
    assert state.is_rank_in_position_embedding_group() == (rank == 0)
    if rank in (0, 3):
        assert ranks_of(state.get_embedding_group()) == [0, 3]
    else:
        assert state.get_embedding_group(check_initialized=False) is None
        with pytest.raises(RuntimeError, match="process group 'embd' is needed"):
            state.get_embedding_group()
    if rank == 0:
        assert ranks_of(state.get_position_embedding_group()) == [0]
    else:
        with pytest.raises(RuntimeError, match="process group 'pos_embd' is needed"):
            state.get_position_embedding_group()


def first_two_stages(pp_ranks: list[int]) -> list[int]:
    return pp_ranks[:2]


def all_stages(pp_ranks: list[int]) -> list[int]:
    return pp_ranks


@ranks(8)
def test_a_users_embedding_rules_choose_the_stages(rank: int) -> None:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=4,
        get_embedding_ranks=all_stages,
        get_position_embedding_ranks=first_two_stages,
    )
    groups = parallel_state.get_process_groups()
    assert groups.embd is groups.pp
    assert parallel_state.is_rank_in_position_embedding_group() == (rank < 4)
    if rank < 4:
        assert groups.ranks("pos_embd") == [rank % 2, rank % 2 + 2]


def another_stage(pp_ranks: list[int]) -> list[int]:
    return [5]


def test_the_default_embedding_rules():
    assert parallel_state.default_embedding_ranks([3]) == [3]
    assert parallel_state.default_embedding_ranks([3, 5, 7]) == [3, 7]
    assert parallel_state.default_position_embedding_ranks([3, 5, 7]) == [3]


@ranks(4)
def test_virtual_stages_decide_about_first_and_last_and_the_embedding(rank: int) -> None:
    state = parallel_state
    state.initialize_model_parallel(
        pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2, get_embedding_ranks=all_stages
    )
    assert state.get_virtual_pipeline_model_parallel_world_size() == 2
    assert state.get_virtual_pipeline_model_parallel_rank() == 0
    for chunk in (0, 1):
        first, last = (rank, chunk) == (0, 0), (rank, chunk) == (3, 1)
        assert state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk) == first
        assert state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk) == last
        has_embedding = {0: first, 3: last}.get(rank, True)
        assert state.is_rank_in_embedding_group(ignore_virtual=False, vp_stage=chunk) == has_embedding
        state.set_virtual_pipeline_model_parallel_rank(chunk)
        assert state.get_virtual_pipeline_model_parallel_rank() == chunk
        assert state.is_pipeline_first_stage(ignore_virtual=False) == first
        assert state.is_pipeline_last_stage(ignore_virtual=False) == last
    assert state.is_pipeline_first_stage() == (rank == 0)
    assert state.is_rank_in_embedding_group()
    state.set_virtual_pipeline_model_parallel_rank(None)
    with pytest.raises(RuntimeError, match="model chunk is unknown; pass vp_stage="):
        state.is_pipeline_first_stage(ignore_virtual=False)
    state.set_virtual_pipeline_model_parallel_world_size(None)
    assert state.is_pipeline_first_stage(ignore_virtual=False) == (rank == 0)


# --- life cycle -------------------------------------------------------------------------------------------------------


def known_groups() -> int:
    return len(distributed_c10d._world.pg_map)


def snapshot() -> dict:
    groups = parallel_state.get_process_groups()
    return {
        "ranks": {name: groups.ranks(name) for name in FIELDS if getattr(groups, name) is not None},
        "shared": [[getattr(groups, a) is getattr(groups, b) for a in FIELDS] for b in FIELDS],
        "created": len(groups.created),
        "known": known_groups(),
        "virtual": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "tp size": parallel_state.get_tensor_model_parallel_world_size(),
    }


CYCLE = [
    {TP: 2},
    {PP: 4, "virtual_pipeline_model_parallel_size": 2},
    {},
    {PP: 2, EP: 2},
    {"num_distributed_optimizer_instances": 2},
]


@ranks(4, timeout_s=150)
@pytest.mark.parametrize("alone", range(len(CYCLE)))
@pytest.mark.in_suite(2)
def test_five_cycles_on_one_store_give_what_a_fresh_start_gives_and_leak_nothing(rank: int, alone: int) -> None:
    parallel_state.initialize_model_parallel(**CYCLE[alone])
    fresh = snapshot()
    parallel_state.destroy_model_parallel()
    for turn in (*range(len(CYCLE)), alone):
        parallel_state.initialize_model_parallel(**CYCLE[turn])
        parallel_state.set_tensor_model_parallel_world_size(64)
        groups = parallel_state.get_process_groups()
        for name in ("mp", "dp_cp", "tp_ep_pp", "intra_dist_opt", "inter_dist_opt"):
            value = torch.tensor([2.0**rank])
            dist.all_reduce(value, group=groups.require(name))
            assert value.item() == sum(2.0**member for member in groups.ranks(name))
        parallel_state.set_tensor_model_parallel_world_size(None)
        again = snapshot()
        parallel_state.set_tensor_model_parallel_rank(5)
        parallel_state.destroy_model_parallel()
        assert known_groups() == 1
        assert not parallel_state.model_parallel_is_initialized()
        assert parallel_state._state == parallel_state._ParallelState()
    assert again == fresh


@ranks(4)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({TP: 3}, RuntimeError, r"world_size \(4\) is not divisible by 3 = tensor \(3\)"),
        ({EP: 3}, RuntimeError, "expert_tensor_model_pipeline_parallel size"),
        ({TP: 0}, ValueError, "tp must be an integer of at least 1, got 0"),
        ({"num_distributed_optimizer_instances": 3}, RuntimeError, "Data parallel size should be divisible by"),
        ({EP: 4, "num_distributed_optimizer_instances": 2}, RuntimeError, "Expert data parallel size should be"),
        ({"virtual_pipeline_model_parallel_size": 2}, RuntimeError, "pipeline-model-parallel size should be greater"),
        ({PP: 2, "virtual_pipeline_model_parallel_size": 0}, ValueError, "must be at least 1 or None, got 0"),
        ({"order": "tp-cp-ep-dp-dp"}, ValueError, "names 'dp' 2 times"),
        ({"order": "tp-cp-ep-pp"}, RuntimeError, r"The size of \(dp\) is \(4\)"),
        ({"distributed_timeout_minutes": 0}, ValueError, "distributed_timeout_minutes must be above 0"),
        ({"high_priority_stream_groups": ["tpp"]}, ValueError, "names the group 'tpp'"),
        ({"get_embedding_ranks": another_stage}, ValueError, r"'embd' group returned \[5\]"),
    ],
)
def test_a_refused_initialization_leaves_nothing_behind(rank: int, arguments: dict, error: type, message: str) -> None:
    created = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error, match=message):
        patch.setattr(dist, "new_group", lambda *args, **rest: created.append(args))
        parallel_state.initialize_model_parallel(**arguments)
    assert created == []
    assert parallel_state._state == parallel_state._ParallelState()
    parallel_state.initialize_model_parallel(2)
    assert parallel_state.get_tensor_model_parallel_world_size() == 2


@ranks(4)
def test_an_initialization_that_fails_half_way_can_be_repeated(rank: int) -> None:
    new_group, left = dist.new_group, [1, 1]

    def fail_third(*args, **rest):
        if not left:
            raise OSError("no more sockets")
        left.pop()
        return new_group(*args, **rest)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no more sockets"):
        patch.setattr(dist, "new_group", fail_third)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    assert known_groups() == 1
    assert parallel_state._state == parallel_state._ParallelState()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    assert parallel_state.get_data_parallel_world_size() == 2


@ranks(4)
@pytest.mark.parametrize(
    ("name", "usual", "other", "words"),
    [
        (
            "tensor_model_parallel_size",
            1,
            2,
            "rank 2 came to initialize_model_parallel with tp=2, and rank 0 with tp=1",
        ),
        (
            "order",
            "tp-cp-ep-dp-pp",
            "tp-cp-ep-pp-dp",
            "with order=tp-cp-ep-pp-dp, and rank 0 with order=tp-cp-ep-dp-pp",
        ),
        ("num_distributed_optimizer_instances", 1, 2, "with num_distributed_optimizer_instances=2, and rank 0 with"),
        ("pipeline_model_parallel_size", 1, 3, r"not divisible by 3 = tensor \(1\) x"),
    ],
)
def test_ranks_that_split_the_job_differently_are_named_on_all_of_them_at_once(
    rank: int, world: int, name: str, usual: object, other: object, words: str
) -> None:
    """They waited for each other in different groups, until the timeout."""
    begun = time.monotonic()
    with pytest.raises((ValueError, RuntimeError), match=words):
        parallel_state.initialize_model_parallel(**{name: other if rank == 2 else usual})
    assert time.monotonic() - begun < 20
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)  # nothing is left behind
    assert parallel_state.get_tensor_model_parallel_world_size() == 2


@ranks(2)
def test_a_second_initialization_is_refused_and_keeps_the_first(rank: int) -> None:
    parallel_state.initialize_model_parallel(2)
    groups = parallel_state.get_process_groups()
    with pytest.raises(RuntimeError, match="data parallel group is already initialized; call destroy_model_parallel"):
        parallel_state.initialize_model_parallel(1)
    assert parallel_state.get_process_groups() is groups
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_model_parallel()


def test_without_a_default_process_group_initialization_says_what_to_call():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group first"):
        parallel_state.initialize_model_parallel()
    assert not parallel_state.is_initialized()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pipeline_model_parallel_comm_backend", "ucc"),
        ("use_sharp", True),
        ("hierarchical_context_parallel_sizes", [2, 2]),
        ("hybrid_context_parallel", True),
        ("gtp_remat", 2),
        ("expert_gtp_remat", 2),
        ("sharp_enabled_group", "dp"),
        ("rank_offset", 8),
        ("local_world_size", 8),
    ],
)
def test_arguments_that_are_not_supported_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"does not support {name}="):
        parallel_state.initialize_model_parallel(**{name: value})


def group_accessors() -> list[str]:
    names = (name for name in dir(parallel_state) if name.startswith("get_"))
    return [name for name in names if name.endswith(("_group", "_group_gloo"))]


def test_before_initialization_every_accessor_says_so():
    assert len(group_accessors()) >= 20
    for name in group_accessors():
        accessor = getattr(parallel_state, name)
        with pytest.raises(RuntimeError, match="not initialized"):
            accessor()
        if "check_initialized" in inspect.signature(accessor).parameters:
            assert accessor(check_initialized=False) is None
    with pytest.raises(RuntimeError, match="not initialized"):
        parallel_state.get_tensor_model_parallel_world_size()
    with pytest.raises(RuntimeError, match="not initialized"):
        parallel_state.get_process_groups()
    with pytest.raises(RuntimeError, match="not initialized"):
        parallel_state.get_rank_grid()
    with pytest.raises(RuntimeError, match="not initialized"):
        parallel_state.get_context_parallel_global_ranks()
    assert parallel_state.get_context_parallel_global_ranks(check_initialized=False) is None
    assert parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False) is None
    with pytest.raises(RuntimeError, match="hybrid data context parallel group is not initialized"):
        parallel_state.get_hybrid_data_context_parallel_groups()


@pytest.fixture
def forgotten():
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    "name",
    [
        "tensor_model_parallel_world_size",
        "tensor_model_parallel_rank",
        "pipeline_model_parallel_world_size",
        "pipeline_model_parallel_rank",
        "virtual_pipeline_model_parallel_world_size",
        "virtual_pipeline_model_parallel_rank",
        "data_parallel_rank",
        "expert_model_parallel_world_size",
        "expert_model_parallel_rank",
        "expert_tensor_parallel_world_size",
        "expert_tensor_parallel_rank",
    ],
)
def test_what_a_setter_sets_its_getter_returns_until_destroyed(forgotten, name):
    set_value, get_value = getattr(parallel_state, f"set_{name}"), getattr(parallel_state, f"get_{name}")
    set_value(3)
    assert get_value() == 3
    set_value(0)
    assert get_value() == 0
    parallel_state.destroy_model_parallel()
    if name.startswith("virtual"):
        assert get_value() is None
    else:
        with pytest.raises(RuntimeError, match="not initialized"):
            get_value()


def test_stages_follow_the_stand_in_sizes(forgotten):
    parallel_state.set_pipeline_model_parallel_world_size(4)
    for stage, (first, last) in {0: (True, False), 1: (False, False), 3: (False, True)}.items():
        parallel_state.set_pipeline_model_parallel_rank(stage)
        assert (parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()) == (first, last)


@ranks(2)
def test_a_passable_subset_of_the_groups(rank: int) -> None:
    parallel_state.initialize_model_parallel(2)
    subset = parallel_state.ProcessGroupCollection.use_mpu_process_groups(["tp", "dp_cp"])
    assert subset.tp is parallel_state.get_tensor_model_parallel_group()
    assert subset.pp is None
    assert (
        parallel_state.ProcessGroupCollection.use_mpu_process_groups().mp is parallel_state.get_model_parallel_group()
    )


@ranks(2)
def test_timeouts_are_set_at_the_start_and_later(rank: int) -> None:
    parallel_state.initialize_model_parallel(distributed_timeout_minutes=7)

    def timeouts() -> set[timedelta]:
        created = parallel_state.get_process_groups().created
        return {group._get_backend(torch.device("cpu")).options._timeout for group in created}

    assert timeouts() == {timedelta(minutes=7)}
    tensor = parallel_state.get_tensor_model_parallel_group()
    parallel_state.update_pg_timeout(timedelta(minutes=3), tensor)
    assert timeouts() == {timedelta(minutes=3), timedelta(minutes=7)}
    parallel_state.update_pg_timeout(timedelta(minutes=2))
    assert timeouts() == {timedelta(minutes=2)}


@ranks(2)
def test_control_groups_are_absent_when_not_wanted_and_then_named(rank: int) -> None:
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    with pytest.raises(RuntimeError, match="process group 'dp_gloo' is needed"):
        parallel_state.get_data_parallel_group_gloo()


@ranks(1)
def test_high_priority_groups_are_asked_for_by_their_fields(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        given = {}
        patch.setattr(ProcessGroups, "build", lambda members, **rest: given.update(rest) or ProcessGroups())
        parallel_state.initialize_model_parallel(high_priority_stream_groups=["tp", "ep_dp"])
    assert set(given["options"]) == {"tp", "expt_dp"}


@ranks(2)
def test_a_group_of_the_users_own_outlives_the_model_parallel_ones(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    own = parallel_state.create_group([0, 1], timeout=timedelta(seconds=30), group_desc="own")
    parallel_state.destroy_model_parallel()
    value = torch.tensor([2.0**rank])
    dist.all_reduce(value, group=own)
    assert value.item() == 3.0


@ranks(1)
def test_the_memory_buffer_reuses_its_memory_and_ends_with_the_groups(rank: int) -> None:
    with pytest.raises(RuntimeError, match="memory buffer is not initialized"):
        parallel_state.get_global_memory_buffer()
    parallel_state.initialize_model_parallel()
    memory = parallel_state.get_global_memory_buffer()
    large = memory.get_tensor([4, 8], torch.float32, "mpu")
    small = memory.get_tensor((2, 3), torch.float32, "mpu")
    assert (large.shape, small.shape) == ((4, 8), (2, 3))
    assert small.data_ptr() == large.data_ptr()
    assert memory.get_tensor([4, 8], torch.float32, "other").data_ptr() != large.data_ptr()
    assert memory.get_tensor([4, 8], torch.float64, "mpu").dtype == torch.float64
    assert memory.get_tensor([5, 8], torch.float32, "mpu").numel() == 40
    parallel_state.destroy_global_memory_buffer()
    with pytest.raises(RuntimeError, match="memory buffer is not initialized"):
        parallel_state.get_global_memory_buffer()

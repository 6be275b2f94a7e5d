"""Process groups on real gloo ranks: what is created, shared, named and destroyed."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from core import parallel_state
from core.groups.group_options import COMMUNICATOR_SETTINGS, GROUP_NAMES, GroupOptions, get_nccl_options, group_options
from core.groups.process_groups import CONTROL_GROUPS, FIELDS, GRADIENT_KINDS, ProcessGroups
from core.groups.rank_grid import RankGrid, group_ranks
from tests.unit_tests.ranks import ranks


def build(grid: RankGrid, **arguments) -> ProcessGroups:
    instances = arguments.pop("num_instances", 1)
    return ProcessGroups.build(group_ranks(grid, dist.get_rank(), num_instances=instances), **arguments)


def known_groups() -> dict[str, int]:
    """How many entries torch holds of each kind, the default group included."""
    world = distributed_c10d._world
    tables = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
    return {table: len(getattr(world, table)) for table in tables}


def sum_over(group) -> float:
    value = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(value, group=group)
    return value.item()


# --- the object -------------------------------------------------------------------------------------------------------


def test_an_unknown_group_is_refused_by_name():
    with pytest.raises(ValueError, match="Unknown attribute: dpp"):
        ProcessGroups(dpp=None)
    with pytest.raises(ValueError, match="Unknown attribute: tpp"):
        ProcessGroups().tpp = None
    with pytest.raises(ValueError, match="Unknown attribute: tpp"):
        ProcessGroups().require("tpp")


def test_a_group_that_was_not_given_reads_none_and_is_named_when_it_is_needed():
    groups = parallel_state.ProcessGroupCollection()
    assert all(getattr(groups, name) is None for name in FIELDS)
    assert (groups.size("tp"), groups.rank("tp")) == (1, 0)
    with pytest.raises(RuntimeError, match="process group 'embd' is needed"):
        groups.require("embd")


def test_the_groups_of_parallel_state_are_asked_for_by_valid_names():
    with pytest.raises(ValueError, match=r"Invalid process groups requested: \['tpp'\]"):
        parallel_state.ProcessGroupCollection.use_mpu_process_groups(["tp", "tpp"])


@ranks(2)
def test_groups_that_a_user_passed_are_not_destroyed_with_the_object(rank: int) -> None:
    group = dist.new_group([0, 1])
    groups = ProcessGroups(dp=group, dp_cp=group)
    assert (groups.size("dp"), groups.rank("dp_cp"), groups.ranks("dp")) == (2, rank, [0, 1])
    groups.destroy()
    assert sum_over(group) == 3.0


# --- creation ---------------------------------------------------------------------------------------------------------


@ranks(4)
def test_kinds_with_equal_ranks_share_one_group(rank: int) -> None:
    groups = build(RankGrid(4, tp=2))
    by_ranks: dict[tuple[tuple[int, ...], bool], set[int]] = {}
    for name in FIELDS:
        if getattr(groups, name) is not None:
            members = tuple(groups.ranks(name))
            carries_gradients = len(members) > 1 and name in GRADIENT_KINDS
            by_ranks.setdefault((members, carries_gradients), set()).add(id(getattr(groups, name)))
    assert all(len(objects) == 1 for objects in by_ranks.values())
    assert len({group for objects in by_ranks.values() for group in objects}) == len(by_ranks)
    assert {len(members) for members, _ in by_ranks} == {1, 2, 4}
    # itself, tp, dp and its control group; all four for activations (tp_dp) and, as optimizer instance, the default one
    assert len(groups.created) == len(by_ranks) - 1 == 5


@ranks(4)
def test_gradients_never_share_a_group_with_activations(rank: int) -> None:
    for grid in (
        RankGrid(4, ep=4),
        RankGrid(4, cp=4),
        RankGrid(4, tp=2, ep=2),
        RankGrid(4, tp=2, cp=2, expt_tp=1, ep=2),
    ):
        groups = build(grid)
        carriers = {id(getattr(groups, name)) for name in GRADIENT_KINDS if groups.size(name) > 1}
        others = set(FIELDS) - GRADIENT_KINDS
        assert carriers and not carriers & {id(getattr(groups, name)) for name in others}
        dist.barrier()  # a rank that destroys a group while another still connects to it would break that
        groups.destroy()


@ranks(2)
def test_the_whole_world_is_the_default_group_only_as_optimizer_instance(rank: int) -> None:
    groups = build(RankGrid(2, pp=2), control_groups=False)
    assert groups.intra_dist_opt is dist.group.WORLD
    assert groups.mp is not dist.group.WORLD
    groups.destroy()
    groups = ProcessGroups.build({"tp": [rank], "intra_dist_opt": [0, 1]})
    assert groups.intra_dist_opt is dist.group.WORLD
    groups.destroy()
    assert sum_over(None) == 3.0


@ranks(4)
def test_only_groups_of_this_rank_are_created(rank: int) -> None:
    asked = []
    new_group = dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", lambda ranks, **rest: asked.append(ranks) or new_group(ranks, **rest))
        groups = build(RankGrid(4, pp=2, ep=2))
    assert all(rank in ranks for ranks in asked)
    assert len(asked) == len(groups.created) == known_groups()["pg_map"] - 1


def test_the_number_of_creations_does_not_grow_with_the_world():
    for world in (512, 1024, 16384):
        dist.init_process_group("fake", store=FakeStore(), rank=world // 2, world_size=world)
        try:
            groups = build(RankGrid(world, tp=4, pp=8, ep=8), control_groups=False)
            assert len(groups.created) == known_groups()["pg_map"] - 1 == 10
            assert groups.size("dp") == world // 32
        finally:
            dist.destroy_process_group()


@ranks(2)
def test_control_groups_are_other_groups_of_the_same_ranks_and_absent_when_not_wanted(rank: int) -> None:
    groups = build(RankGrid(2))
    for control, name in CONTROL_GROUPS.items():
        assert getattr(groups, control) is not getattr(groups, name)
        assert groups.ranks(control) == groups.ranks(name)
    assert len({id(getattr(groups, control)) for control in CONTROL_GROUPS}) == 1
    groups.destroy()
    groups = build(RankGrid(2), control_groups=False)
    assert all(getattr(groups, control) is None for control in CONTROL_GROUPS)


@ranks(2)
def test_the_timeout_reaches_every_group(rank: int) -> None:
    groups = build(RankGrid(2), timeout=timedelta(seconds=77))
    for group in groups.created:
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


@ranks(4, timeout_s=40)
def test_ranks_with_different_numbers_of_groups_still_meet(rank: int) -> None:
    # torch derives the name under which members meet from the number of groups a process has.
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    groups = build(RankGrid(4, pp=4), timeout=timedelta(seconds=10))
    assert (groups.embd is None) == (rank in (1, 2))
    assert sum_over(groups.require("pp")) == 15.0
    # Here ranks 1 and 2 have one group fewer than 0 and 3, and a second build goes over all of them.
    second = build(RankGrid(4, tp=4), timeout=timedelta(seconds=10))
    assert sum_over(second.require("tp")) == 15.0
    assert sum_over(groups.require("pp")) == 15.0


@ranks(4, timeout_s=40)
def test_ranks_that_arrive_late_and_in_any_order_do_not_deadlock(rank: int) -> None:
    for late in range(4):
        time.sleep(0.1 * ((rank + late) % 4))
        groups = build(RankGrid(4, tp=2, pp=2), timeout=timedelta(seconds=10))
        assert sum_over(groups.require("tp")) == (3.0 if rank < 2 else 12.0)
        groups.destroy()


@ranks(1, 2)
def test_torch_names_its_own_groups_again_afterwards(rank: int) -> None:
    before = distributed_c10d._process_group_name
    build(RankGrid(dist.get_world_size()))
    assert distributed_c10d._process_group_name is before
    assert not dist.new_group().group_name.startswith("core.")


@ranks(1)
def test_a_torch_that_does_not_take_our_names_is_an_error(rank: int) -> None:
    new_group = dist.new_group

    def rename(ranks, **rest):
        distributed_c10d._process_group_name = lambda ranks, use_hashed_name: "torch's own"
        return new_group(ranks, **rest)

    before = known_groups()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match='named the group .tp. "torch.s'):
        patch.setattr(dist, "new_group", rename)
        build(RankGrid(1))
    assert known_groups() == before


# --- destruction ------------------------------------------------------------------------------------------------------


@ranks(4)
def test_five_builds_on_one_store_leave_no_group_behind(rank: int) -> None:
    before = known_groups()
    grids = [RankGrid(4, tp=2), RankGrid(4, pp=4), RankGrid(4), RankGrid(4, pp=2, ep=2), RankGrid(4, tp=2)]
    for grid in grids:
        groups = build(grid)
        for name in ("tp", "pp", "dp_cp", "expt_dp", "mp"):
            assert sum_over(getattr(groups, name)) == sum(2.0**member for member in groups.ranks(name))
        groups.destroy()
        assert known_groups() == before
        assert all(getattr(groups, name) is None for name in FIELDS)
        groups.destroy()  # the second time does nothing


@ranks(2)
def test_destroying_after_the_default_group_is_harmless(rank: int) -> None:
    groups = build(RankGrid(2))
    dist.destroy_process_group()
    groups.destroy()


@ranks(4, timeout_s=40)
@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_failure_in_the_middle_of_creation_destroys_what_was_made(rank: int, failing: int) -> None:
    before, new_group, calls = known_groups(), dist.new_group, []

    def fail_at(ranks, **rest):
        calls.append(ranks)
        if len(calls) == failing:
            dist.barrier()  # one that destroys its groups early closes connections that others still make
            raise OSError("no more sockets")
        return new_group(ranks, **rest)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no more sockets"):
        patch.setattr(dist, "new_group", fail_at)
        build(RankGrid(4, tp=2))
    assert known_groups() == before
    groups = build(RankGrid(4, tp=2))
    assert sum_over(groups.require("tp_dp")) == 15.0


@pytest.mark.nightly  # half a minute of waiting for gloo's timeouts
@ranks(4, timeout_s=150)
def test_a_failure_on_one_rank_ends_the_creation_on_all_and_leaves_nothing(rank: int) -> None:
    before, new_group, calls = known_groups(), dist.new_group, []

    def fail_on_rank_1(ranks, **rest):
        calls.append(ranks)
        if rank == 1 and len(calls) == 2:
            raise OSError("no more sockets")
        return new_group(ranks, **rest)

    with pytest.MonkeyPatch.context() as patch, pytest.raises((OSError, RuntimeError)):
        patch.setattr(dist, "new_group", fail_on_rank_1)
        build(RankGrid(4, tp=2, pp=2), timeout=timedelta(seconds=1))
    assert known_groups() == before
    dist.barrier()  # whoever waited until the timeout arrives later
    groups = build(RankGrid(4, tp=2, pp=2), timeout=timedelta(seconds=20))
    assert sum_over(groups.require("mp")) == 15.0


# --- options of the communicator --------------------------------------------------------------------------------------


class RecordedOptions:
    """Stands for torch's ProcessGroupNCCL.Options, which a CPU build of torch does not have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = type("Config", (), {})()


def stand_in_for_nccl(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dist, "ProcessGroupNCCL", type("NCCL", (), {"Options": RecordedOptions}), raising=False)


@pytest.fixture
def nccl(monkeypatch):
    stand_in_for_nccl(monkeypatch)


def test_high_priority_names_reach_their_groups(nccl):
    options = group_options(["tp", "ep_dp", "intra_dist_opt_instance"])
    assert options == {name: GroupOptions(True) for name in ("tp", "expt_dp", "intra_dist_opt")}
    assert options["tp"].nccl().is_high_priority_stream
    assert GroupOptions().nccl() is None
    with pytest.raises(ValueError, match="high_priority_stream_groups names the group 'etp'"):
        group_options(["etp"])
    assert set(GROUP_NAMES.values()) == set(FIELDS) - set(CONTROL_GROUPS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense: {max_ctas: 1}", "names the group 'nonsense'"),
        ("dp: {max_cta: 1}", "unknown setting 'max_cta'"),
        ("dp: {max_ctas: many}", "max_ctas='many'"),
        ("dp: {net_name: carrier_pigeon}", "net_name='carrier_pigeon'"),
        ("dp: {is_high_priority_stream: 1}", "is_high_priority_stream=1"),
        ("dp: 3", "'dp' must map settings to values, got 3"),
        ("- dp", "must map group names to settings"),
    ],
)
def test_a_communicator_file_with_a_mistake_is_refused(tmp_path, text, message):
    pytest.importorskip("yaml")
    (tmp_path / "nccl.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        group_options(config_path=str(tmp_path / "nccl.yaml"))


def test_a_communicator_file_sets_options(tmp_path, nccl):
    pytest.importorskip("yaml")
    text = "dp: {max_ctas: 8, net_name: ib}\nep_tp: {is_high_priority_stream: true}"
    (tmp_path / "nccl.yaml").write_text(text)
    options = group_options(config_path=str(tmp_path / "nccl.yaml"))
    assert options == {"dp": GroupOptions(False, (("max_ctas", 8), ("net_name", "IB"))), "expt_tp": GroupOptions(True)}
    assert vars(options["dp"].nccl().config) == {"max_ctas": 8, "net_name": "IB"}


def test_options_of_one_group_from_settings(nccl):
    options = get_nccl_options("tp", {"tp": {"min_ctas": 2, "is_high_priority_stream": True}})
    assert options.is_high_priority_stream
    assert options.config.min_ctas == 2
    assert get_nccl_options("dp", {"tp": {}}) is None
    assert "min_ctas" in COMMUNICATOR_SETTINGS


@ranks(2)
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cpu:gloo"])
def test_options_are_given_to_nccl_only_and_split_sharing(rank: int, backend: str) -> None:
    given = []
    new_group = dist.new_group

    def record(ranks, backend, pg_options, **rest):
        given.append((list(ranks), backend, pg_options and pg_options.is_high_priority_stream))
        return new_group(ranks, backend="gloo", **rest)

    with pytest.MonkeyPatch.context() as patch:
        stand_in_for_nccl(patch)
        patch.setattr(dist, "new_group", record)
        patch.setattr(dist, "get_backend_config", lambda group=None: backend)
        groups = build(RankGrid(2, pp=2), options=group_options(["pp"]))
    world = [row for row in given if len(row[0]) == 2]
    if "nccl" in backend:
        assert world == [([0, 1], None, True), ([0, 1], None, None)]  # pp and mp
        assert groups.pp is not groups.mp
        assert groups.dp_gloo is not groups.dp
        assert groups.dp_gloo is groups.expt_dp_gloo
        assert [row[1] for row in given].count("gloo") == 1
    else:
        assert world == [([0, 1], "gloo", None)]
        assert groups.pp is groups.mp


@ranks(2)
def test_no_rank_has_groups_before_every_rank_has_made_its_own(rank: int) -> None:
    """Else a rank could destroy its groups while another one still connects, which then fails."""
    new_group = dist.new_group

    def slowly(*arguments, **rest):
        group = new_group(*arguments, **rest)
        if rank == 1:
            time.sleep(0.1)
        made_all.append(time.time())
        return group

    for _ in range(2):  # with nothing between
        made_all: list[float] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", slowly)
            groups = build(RankGrid(2))
        begun_to_destroy = time.time()
        groups.destroy()
        times: list[tuple[float, float]] = [(0.0, 0.0)] * 2
        dist.all_gather_object(times, (made_all[-1], begun_to_destroy))
        assert times[0][1] > times[1][0]


@pytest.mark.nightly  # a race: seldom lost on an idle machine
@ranks(4)
def test_groups_are_made_and_destroyed_with_nothing_between(rank: int) -> None:
    for count in range(40):
        build(RankGrid(4, tp=1 + count % 2, pp=1 + (count % 3 == 0))).destroy()

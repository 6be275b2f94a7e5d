"""core.groups.agree against what a reader computes by hand: every rank learns the same, and every rank raises."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.groups import agree
from core.groups.agree import LayoutMismatch
from core.groups.process_groups import ProcessGroups, world_groups
from core.watch.waiting import PeerLost
from tests.unit_tests.ranks import ranks


def rows_and_columns(rank: int) -> list[dist.ProcessGroup]:
    """Four ranks as two rows and two columns: a chain of groups that reaches all of them."""
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return [group for group in groups if rank in dist.get_process_group_ranks(group)]


@ranks(1, 2, 4)
def test_all_ranks_learn_the_least_and_the_largest_of_each_number(rank: int, world: int) -> None:
    last = world - 1
    expected = [0, -last, 7, -(2**55)], [last, 0, 7, last - 2**55]
    assert agree.bounds([rank, -rank, 7, rank - 2**55], None, "a test") == expected


@ranks(4)
def test_a_chain_of_groups_reaches_every_rank_once(rank: int, world: int) -> None:
    chain = rows_and_columns(rank)
    assert agree.gather(10 * rank, chain, "a test") == {0: 0, 1: 10, 2: 20, 3: 30}
    assert agree.gather(rank, chain[0], "a test") == {r: r for r in ([0, 1] if rank < 2 else [2, 3])}
    assert agree.any(rank == 3, chain, "a test") and not agree.any(False, chain, "a test")
    assert agree.any(rank == 3, chain[0], "a test") == (rank >= 2)
    assert agree.first((2 - rank // 3, rank, "found") if rank else None, chain, "a test") == (1, 3, "found")
    assert agree.first(None, chain, "a test") is None
    groups = ProcessGroups(tp=chain[0], dp_cp=chain[1])
    assert agree.gather(rank, world_groups(groups), "a test") == {r: r for r in range(4)}


@ranks(4)
def test_values_are_equal_only_where_all_ranks_of_the_chain_have_them(rank: int, world: int) -> None:
    chain = rows_and_columns(rank)
    assert agree.equal({"a": 1.5}, chain, "a test")
    assert not agree.equal({"a": 1.5 + (rank == 2) * 1e-9}, chain, "a test")
    assert agree.equal(rank // 2, chain[0], "a test") and not agree.equal(rank // 2, chain[1], "a test")
    assert not agree.equal("alike", chain, "a test", failed=rank == 1)


@ranks(3)
def test_an_error_of_one_rank_is_raised_on_all_of_them_by_its_name(rank: int, world: int) -> None:
    agree.refuse(None, None, "the start")
    mine = KeyError("no such file") if rank > 0 else None
    expected = KeyError if mine else OSError
    with pytest.raises(
        expected, match="no such file" if mine else "the start: rank 1 failed: KeyError: 'no such file'"
    ):
        agree.refuse(mine, None, "the start", OSError)


@ranks(3)
def test_the_first_line_in_which_ranks_differ_is_named_on_all_of_them(rank: int, world: int) -> None:
    world_group = dist.group.WORLD
    agree.same([("all ranks", world_group, ["a = 1", "b = 2"])])
    table = ["a = 1", "b = 2", *(["c = 3"] if rank == 2 else [])]
    with pytest.raises(LayoutMismatch, match=r"rank 2 has c = 3; rank 0 has nothing.*\(all ranks, ranks \[0, 1, 2\]\)"):
        agree.same([("all ranks", world_group, table)])
    with pytest.raises(ValueError, match=r"rank 1 has a = 1; rank 0 has a = 0 .* Pass it alike"):
        agree.same([("all ranks", world_group, [f"a = {min(rank, 1)}"])], kind=ValueError, advice="Pass it alike")


@ranks(4)
def test_what_one_group_finds_is_raised_on_the_ranks_of_the_next_ones(rank: int, world: int) -> None:
    row, column = rows_and_columns(rank)
    tables = [("the row", row, [f"a = {rank == 1}"]), ("the column", column, ["b = 0"])]
    words = "rank 1 has a = True; rank 0 has a = False"
    if rank >= 2:
        words = rf"rank {rank - 2} of the column \[{rank - 2}, {rank}\] failed. LayoutMismatch: {words}"
    with pytest.raises(LayoutMismatch, match=words):
        agree.same(tables)
    mine = OSError("disk full") if rank == 3 else None
    with pytest.raises(OSError if mine else ValueError, match="disk full"):
        agree.same([("the row", row, []), ("the column", column, [])], mine, kind=ValueError)


def test_without_a_job_a_process_agrees_with_itself() -> None:
    assert not dist.is_initialized()
    assert agree.gather("mine", None, "a test") == {0: "mine"}
    assert agree.any(True, None, "a test") and agree.first((0, "it"), None, "a test") == (0, "it")
    with pytest.raises(ValueError, match="^mine$"):
        agree.refuse(ValueError("mine"), None, "a test")


@pytest.mark.parametrize(
    "config, control, tensors",
    [
        ("cpu:gloo,cuda:gloo", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu", "cuda:3"),
        ("cuda:nccl", "cuda:3", "cuda:3"),
        ("xpu:xccl", "xpu:3", "xpu:3"),
        ("cpu:mpi,cuda:mpi", "cpu", "cpu"),
    ],
)
def test_tensors_are_on_the_device_that_the_backend_serves(
    config: str, control: str, tensors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(current_device=lambda: 3))
    group: Any = None
    assert (str(agree.control_device(group)), str(agree.device_of(group))) == (control, tensors)


@ranks(2)
def test_the_profiler_shows_what_ranks_agree_on(rank: int, world: int) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        agree.any(False, None, "a certain fact")
    assert any(re.fullmatch("core::agree a certain fact", event.key) for event in profile.key_averages())


@ranks(2)
def test_ranks_that_agree_on_different_things_all_learn_so_at_once(rank: int, world: int) -> None:
    """A guard that rank 0 alone is asked for meets the agreement of a step. Their numbers would be mixed silently if
    they are equally many, and gloo aborts the process if they are not.
    """
    parallel_state.initialize_model_parallel()
    what, count = ("the weights", 5) if rank == 0 else ("the end of a step", 20)
    words = f"rank {rank} waited .* for {what}.*another rank came to agree on something else.*rank {1 - rank} waited"
    with pytest.raises(PeerLost, match=words):
        agree.bounds([0] * count, None, what)

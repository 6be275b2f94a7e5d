"""Gathers that other ranks never come to end within seconds and name the call. A slow rank is waited for."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.verify import rank_pool
from core.verify.rank_pool import RankFailure, RankPool
from core.watch import waiting
from core.watch.waiting import deadlocked_ranks
from tests.unit_tests.ranks import ranks


def sharded(share_host_memory: bool = False) -> DistributedDataParallel:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params", bucket_size=80, share_host_memory=share_host_memory
    )
    return DistributedDataParallel(None, config, module)


@torch.no_grad()
def generate(model: Any, tokens: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, 8).view(1, 8)
    for _ in range(tokens):
        x = model(x)
    return x


def generate_unequally(model: DistributedDataParallel, rank: int) -> None:
    generate(model, 2 + rank)


def save_on_one(model: DistributedDataParallel, rank: int) -> None:
    if rank == 1:
        model.state_dict()


def save_while_others_train(model: DistributedDataParallel, rank: int) -> None:
    """The gathers of a state dict and of a forward meet; what follows would be other collectives of one group."""
    save_on_one(model, rank)
    model(torch.ones(1, 8)).sum().backward()
    finalize_model_grads([model])


CASES: dict[str, tuple[Callable[[DistributedDataParallel, int], None], bool, str]] = {
    "generate": (generate_unequally, False, "call it inside `model.gathered()`, or with synced_gpus=True"),
    "state_dict": (save_on_one, False, "state_dict() of a model with sharded parameters is collective: call it on all"),
    "state_dict, others train": (save_while_others_train, False, "the gather of parameters for state_dict()"),
    "state_dict, one memory": (save_on_one, True, "state_dict() of a model with sharded parameters is collective"),
}


def wait_in_vain(case: str) -> None:
    """Rank 0 is in a barrier, and rank 1 waits for it elsewhere."""
    waiting.PATIENCE_S, waiting.LOOK_S = 1.0, 0.6
    parallel_state.initialize_model_parallel(distributed_timeout_minutes=1)
    act, share_host_memory, _ = CASES[case]
    act(sharded(share_host_memory), dist.get_rank())
    dist.barrier()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.nightly) if case == "state_dict" else case for case in CASES]
)
def test_a_call_that_the_others_leave_out_is_named_within_seconds(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "train" not in case:  # else both ranks have something to say, and the pool waits for the second
        monkeypatch.setattr(rank_pool, "GRACE_S", 0.5)
    with RankPool(2) as pool, pytest.raises(RankFailure) as failed:
        pool.run(wait_in_vain, 2, (case,), limit_s=30.0)
    words = str(failed.value)
    found = re.search(r"rank 1 waited (\d+\.\d) s for ", words)
    assert found is not None and float(found[1]) < 10, words
    assert "ranks 0, 1 wait for different things" in words and CASES[case][2] in words
    if "train" not in case:  # there rank 0 fails in its backward, and says where rank 1 is
        assert "PeerLost: rank 1 waited " in words and "rank 0 did not come: in wait_in_vain (" in words


@ranks(2)
def test_unequal_lengths_inside_gathered_and_a_rank_that_sleeps_are_right(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = sharded()
    patience, look = waiting.PATIENCE_S, waiting.LOOK_S
    waiting.PATIENCE_S, waiting.LOOK_S = 0.5, 0.3
    try:
        with model.gathered():
            found = generate(model, 2 + rank)
            expected = generate(model.module, 2 + rank)
        assert torch.equal(found, expected)
        time.sleep(2.5 * rank)  # rank 0 waits for it far beyond its patience
        weights = model.state_dict()
        assert weights["0.weight"].shape == (8, 8) and not weights["0.weight"].isnan().any()
    finally:
        waiting.PATIENCE_S, waiting.LOOK_S = patience, look


def waits(what: str, ranks: list[int], seconds: float = 9.0) -> dict[str, Any]:
    return {"waits": True, "for": what, "ranks": ranks, "seconds": seconds}


COMPUTES = {"waits": False, "for": "", "ranks": [], "seconds": 99.0}


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([waits("a", [0, 1]), waits("b", [0, 1])], [0, 1]),
        ([waits("a", [0, 1]), waits("", [])], [0, 1]),  # a barrier of the program
        ([waits("a", [0, 1]), waits("a", [0, 1])], []),  # a slow network
        ([waits("a", [0, 1]), COMPUTES], []),
        ([waits("a", [0, 1]), waits("b", [0, 1], 4.0)], []),
        ([waits("a", [0, 1]), waits("b", [1, 2]), COMPUTES], []),  # rank 0 waits for one that waits for a slow one
        ([waits("a", [0, 1]), waits("b", [1, 2]), waits("b", [1, 2])], []),
        ([waits("a", [0, 1]), waits("b", [1, 2]), waits("c", [0, 2])], [0, 1, 2]),
        ([waits("a", [0, 1]), waits("b", [0, 1]), COMPUTES], [0, 1]),
        ([waits("a", [0, 1]), {}], []),  # nothing is known of it
    ],
)
def test_only_ranks_that_wait_for_each_other_wait_in_vain(places: list[dict[str, Any]], expected: list[int]) -> None:
    assert deadlocked_ranks(dict(enumerate(places)), patience_s=5.0) == expected

"""A few numbers of every rank on all of them, in mapped memory and by all-reduce, against sums made by hand."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.distributed import finalize_model_grads
from core.distributed.wire.small_exchange import SmallExchange
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

CPU = torch.device("cpu")


def numbers_of(rank: int, turn: int) -> list[float]:
    """Sums of them depend on the order in which they are added."""
    return [0.1 * (rank + 1) * 3.0**turn, -(2.0**rank), 1e16 if rank == 0 else 1.0 + turn]


@pytest.mark.parametrize("share", [True, False])
@ranks(1, 2, nightly=(3, 4))
def test_every_rank_has_the_sums_and_maxima_of_all(rank: int, world: int, share: bool) -> None:
    exchange = SmallExchange(dist.group.WORLD, 3, CPU, share_memory=share)
    assert (exchange.memory is not None) == (share and world > 1)
    for turn in range(5):
        rows = [numbers_of(other, turn) for other in range(world)]
        for maxima in (0, 2, 3):
            found = exchange.reduce(torch.tensor(numbers_of(rank, turn), dtype=torch.float64), maxima=maxima)
            columns = list(zip(*rows, strict=True))
            expected = [max(column) if i < maxima else math.fsum(column) for i, column in enumerate(columns)]
            assert found.tolist() == pytest.approx(expected, rel=1e-15)
            everybody: list[list[float]] = [[]] * world
            dist.all_gather_object(everybody, found.tolist())
            assert all(other == everybody[0] for other in everybody)


@ranks(3)
def test_numbers_that_were_returned_stay_while_others_are_exchanged(rank: int, world: int) -> None:
    """No rank writes its next numbers while another still reads the last; ranks are late in turn."""
    exchange = SmallExchange(dist.group.WORLD, 2, CPU, share_memory=True)
    kept = []
    for turn in range(30):
        if turn % world == rank:
            torch.ones(200_000).cumsum(0)
        kept.append(exchange.reduce(torch.tensor([turn * 10.0**rank, math.inf if turn == 7 and rank == 1 else 1.0])))
    for turn, found in enumerate(kept):
        assert found.tolist() == [turn * 111.0, math.inf if turn == 7 else 3.0]


@ranks(2)
def test_its_memory_goes_with_it(rank: int, world: int) -> None:
    """Not only when a full collection comes: each holds a descriptor for every rank."""
    exchange = SmallExchange(dist.group.WORLD, 2, CPU, share_memory=True)
    exchange.reduce(torch.ones(2))
    memory = weakref.ref(exchange.memory)
    gc.disable()
    try:
        del exchange
        assert memory() is None
    finally:
        gc.enable()
    dist.barrier()


@ranks(2)
def test_stages_that_may_not_all_share_memory_agree_on_another_way(rank: int, world: int) -> None:
    """Nothing else compares this option between pipeline stages; other ranks are refused when they wrap."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    ddp = wrap(torch.nn.Linear(3, 1, bias=False), share_host_memory=rank == 0)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [ddp])
    ddp.zero_grad_buffer()
    ddp(torch.full((1, 3), 3.0 + rank)).sum().backward()  # another part of the model on each rank
    finalize_model_grads([ddp])
    _, norm, _ = optimizer.step()
    assert norm == pytest.approx(math.sqrt(3 * 3.0**2 + 3 * 4.0**2))

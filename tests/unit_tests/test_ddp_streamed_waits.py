"""Strategy optim_grads: backward waits for no rank that may be waiting for this one elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads, streamed_bucket
from core.distributed.streamed_bucket import BucketPool
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, whole_grads, wrap
from tests.unit_tests.test_host_memory import at_once, channels_of

LAYERS = 8


class Layers(nn.Module):
    """A bucket each, any of which can be left out; the last one's gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, left_out: set[int]) -> torch.Tensor:
        used = [layer for number, layer in enumerate(self.layers) if number not in left_out]
        return sum((layer(x).square().sum() for layer in used), torch.zeros((), dtype=torch.float64))


def inputs_of(rank: int, step: int, microbatch: int) -> torch.Tensor:
    return torch.tensor([1.0 + rank, 2.0 - step + 3 * microbatch], dtype=torch.float64)


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """For pools that are made, or begin a step, in this block."""
    before = streamed_bucket.PATIENCE_S
    streamed_bucket.PATIENCE_S = seconds
    try:
        yield
    finally:
        streamed_bucket.PATIENCE_S = before


@ranks(2, timeout_s=30)
@pytest.mark.parametrize("share", [False, True], ids=["sockets", "memory"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("reduce_microbatches", ["last", "every"])
@pytest.mark.parametrize("left_out", [{0}, {LAYERS - 1}, set(range(LAYERS)) - {3}], ids=["last", "first", "most"])
def test_ranks_may_talk_to_each_other_between_backward_and_finalize(
    rank: int, world: int, left_out: set[int], reduce_microbatches: str, overlap: bool, share: bool
) -> None:
    """Rank 0 leaves out a few layers, and with 'every' a microbatch: its buckets leave in finalize, after the exchange
    for which the other ranks must come out of their backward.
    """
    parallel_state.initialize_model_parallel()
    plain = Layers()
    torch.manual_seed(3)
    for param in plain.parameters():
        nn.init.normal_(param)
    ddp_module = Layers()
    ddp_module.load_state_dict(plain.state_dict())
    microbatches = {r: 1 if r == 0 or reduce_microbatches == "last" else 3 for r in range(world)}
    with patience(0.05):
        ddp = wrap(
            ddp_module,
            data_parallel_sharding_strategy="optim_grads",
            bucket_size=1,
            overlap_grad_reduce=overlap,
            reduce_microbatches=reduce_microbatches,
            share_host_memory=share,
        )
        assert len(ddp.buffers[0].buckets) == LAYERS
        for step in range(3):
            plain.zero_grad()
            for r in range(world):
                for n in range(microbatches[r]):
                    (plain(inputs_of(r, step, n), left_out if r == 0 else set()) / world).backward()
            ddp.zero_grad_buffer()
            for n in range(microbatches[rank]):
                ddp(inputs_of(rank, step, n), left_out if rank == 0 else set()).backward()
            told = torch.full((1,), float(rank))
            dist.all_reduce(told)
            assert told.item() == sum(range(world))
            finalize_model_grads([ddp])
            expected = {name: param.grad for name, param in plain.named_parameters()}
            assert min(float(grad.abs().max()) for grad in expected.values()) > 0.1
            assert_same(whole_grads(ddp), expected)
            assert not any(pool.in_flight for pool in ddp.reducer.pools)


@ranks(3, timeout_s=30)
def test_a_rank_without_any_gradient_may_do_other_things_first(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    with patience(0.05):
        ddp = wrap(Layers(), data_parallel_sharding_strategy="optim_grads", bucket_size=1, overlap_grad_reduce=True)
        plain = Layers()
        plain.load_state_dict(ddp.module.state_dict())
        for step in range(2):
            ddp.zero_grad_buffer()
            plain.zero_grad()
            for r in (1, 2):
                (plain(inputs_of(r, step, 0), set()) / world).backward()
            if rank > 0:
                ddp(inputs_of(rank, step, 0), set()).backward()
            dist.barrier()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), {name: param.grad for name, param in plain.named_parameters()})


def test_a_wait_that_was_of_no_use_is_shorter_in_the_next_step() -> None:
    pool = BucketPool(torch.zeros(8), 4)
    whole = streamed_bucket.PATIENCE_S
    for wanted in (whole / 4, whole / 16):
        pool.patience_s = 0.0
        pool.begin_step()
        assert pool.patience_s == wanted
    pool.begin_step()  # it was enough
    assert pool.patience_s == whole


def test_polling_does_nothing_of_a_reduction_before_the_same_of_an_earlier_one() -> None:
    channels, tensors = channels_of(2, 8)
    for rank, tensor in enumerate(tensors):
        tensor.fill_(rank + 1.0)
    mine = [channels[0].all_reduce(tensors[0][:4]), channels[0].reduce_scatter(tensors[0][4:])]
    assert not mine[1].poll() and [handle.stage for handle in mine] == [0, 0]
    real, looks = channels[0].has, []

    def comes_after_the_first_look(stage: int, number: int) -> bool:
        looks.append(number)
        return len(looks) > 1

    channels[0].has = comes_after_the_first_look  # type: ignore[method-assign]
    channels[0].poll(mine[1])
    assert looks == [1] and [handle.stage for handle in mine] == [0, 0]
    channels[0].has = real  # type: ignore[method-assign]
    theirs = [channels[1].all_reduce(tensors[1][:4])]
    assert not mine[1].poll() and [handle.stage for handle in mine] == [1, 0]
    theirs.append(channels[1].reduce_scatter(tensors[1][4:]))
    # The second one's only stage is its first, which the first one has done: it waits for no copies.
    assert not mine[1].poll() and [handle.stage for handle in mine] == [1, 1]
    assert theirs[1].poll() and [handle.stage for handle in theirs] == [2, 1] and not theirs[0].is_done()
    assert mine[1].poll() and mine[0].poll() and [handle.stage for handle in mine] == [2, 1]
    at_once([handle.wait for handle in (*mine, *theirs)])
    assert tensors[0].tolist() == [3.0] * 6 + [1.0] * 2
    assert tensors[1].tolist() == [3.0] * 4 + [2.0] * 2 + [3.0] * 2

"""scale_in_optimizer: the division by data ranks and tokens is left to the optimizer, and to no other one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from core import parallel_state
from core.distributed import DistributedDataParallelConfig, finalize_model_grads
from core.groups.agree import SyncError
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, wrap


def true_gradients(ddp: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Memory times what is still due, by name."""
    return {
        contract.name: view * bucket.step.pending_scale
        for buffer in ddp.grad_buffers
        for bucket in buffer.buckets
        for view, contract in zip(bucket.memory.views, bucket.contracts, strict=True)
    }


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("overlap", [False, True])
def test_memory_times_the_pending_scale_is_the_mean_over_ranks(rank: int, world: int, overlap: bool) -> None:
    parallel_state.initialize_model_parallel()
    plain = make_net()
    expected = mean_over_ranks(plain, world)
    ddp = wrap(make_net(), overlap_grad_reduce=overlap, bucket_size=40, scale_in_optimizer=True)
    for _ in range(2):
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        assert_same(true_gradients(ddp), expected)
        sums = {name: grad * world for name, grad in expected.items()}
        assert_same({name: param.main_grad for name, param in ddp.module.named_parameters()}, sums)


@ranks(2)
def test_tokens_are_left_to_the_optimizer_too(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    config = SimpleNamespace(calculate_per_token_loss=True)
    mean = mean_over_ranks(make_net(), world)
    ddp = wrap(make_net(), config, scale_in_optimizer=True)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp], torch.tensor(3 + 4 * rank))
    expected = {name: grad * world / 10 for name, grad in mean.items()}
    assert_same(true_gradients(ddp), expected)
    bucket = ddp.grad_buffers[0].buckets[0]
    assert bucket.scale_is_due
    assert float(bucket.step.pending_scale) == pytest.approx(0.1)


@ranks(2)
def test_another_optimizer_is_refused_until_the_scale_is_taken(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), scale_in_optimizer=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    with pytest.raises(SyncError, match="scale_in_optimizer"):
        optimizer.step()
    for buffer in ddp.grad_buffers:
        for bucket in buffer.buckets:
            assert bucket.step.pending_scale == 0.5
    ddp.zero_grad_buffer()
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    with pytest.raises(SyncError, match="scale_in_optimizer"):
        optimizer.step()


def test_it_excludes_averaging_in_the_collective() -> None:
    with pytest.raises(ValueError, match="choose one"):
        DistributedDataParallelConfig(scale_in_optimizer=True, average_in_collective=True)

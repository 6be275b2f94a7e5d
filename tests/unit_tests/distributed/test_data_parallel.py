"""The gradients of DistributedDataParallel against one process, unsplit, in fp64."""

import pytest
import torch

from core import parallel_state
from core.distributed import finalize_model_grads
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

STRATEGIES = ("no_shard", "optim", "optim_grads")


@ranks(1, 3, 4, nightly=(2, 8))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.in_suite(5)
def test_gradients_are_the_mean_over_ranks_in_every_step(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    for overlap in (False, True):
        for bucket_size in (None, 1, 60):
            model = make_net()
            expected = mean_over_ranks(model, world)
            ddp = wrap(
                model,
                data_parallel_sharding_strategy=strategy,
                overlap_grad_reduce=overlap,
                bucket_size=bucket_size,
            )
            for _ in range(3):
                ddp.zero_grad_buffer()
                loss_of(ddp, rank, 0).backward()
                finalize_model_grads([ddp])
                assert_same(whole_grads(ddp), expected)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.in_suite()
def test_microbatches_are_added(rank: int, world: int, strategy: str, overlap: bool) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    expected = mean_over_ranks(model, world, (0, 1, 2))
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=60)
    for _ in range(2):
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            loss_of(ddp, rank, 0).backward()
            with ddp.no_sync():
                loss_of(ddp, rank, 1).backward()
        loss_of(ddp, rank, 2).backward()
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), expected)


@ranks(4)
@pytest.mark.parametrize("overlap", [False, True])
def test_two_optimizer_instances_shard_inside_and_add_across(rank: int, world: int, overlap: bool) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    model = make_net()
    expected = mean_over_ranks(model, world)
    ddp = wrap(
        model,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=2,
        overlap_grad_reduce=overlap,
        bucket_size=60,
    )
    for _ in range(2):
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        assert torch.distributed.get_world_size(ddp.grad_buffers[0].buckets[0].groups.shard) == 2
        assert_same(whole_grads(ddp), expected)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nanogpts_switch_accumulates_as_no_sync_does(rank: int, world: int, strategy: str) -> None:
    """`model.require_backward_grad_sync = last` before each microbatch, as its loop writes it for torch's wrapper."""
    parallel_state.initialize_model_parallel()
    model = make_net()
    expected = mean_over_ranks(model, world, (0, 1, 2))
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=60)
    sent = {}
    for way in ("one microbatch", "switch", "without", "switch"):
        ddp.zero_grad_buffer()
        for microbatch in (2,) if way == "one microbatch" else range(3):
            if way == "switch":
                ddp.require_backward_grad_sync = microbatch == 2
            loss_of(ddp, rank, microbatch).backward()
        finalize_model_grads([ddp])
        sent[way] = ddp.step_report().bytes_sent
        if way != "one microbatch":
            assert_same(whole_grads(ddp), expected)
    assert sent["switch"] == sent["one microbatch"] < sent["without"]
    with ddp.no_sync():
        assert not ddp.require_backward_grad_sync
        with ddp.no_sync():
            pass
        assert not ddp.require_backward_grad_sync
    assert ddp.require_backward_grad_sync

"""no_sync, start_grad_sync, finish_grad_sync, force_all_reduce: in every order in which users call them."""

import copy

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.distributed import finalize_model_grads
from core.distributed.buffer.grad_placeholder import GradPlaceholder
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

SETTINGS = [(strategy, overlap) for strategy in ("no_shard", "optim", "optim_grads") for overlap in (False, True)]


@ranks(2)
def test_no_sync_may_be_nested_and_left_by_an_exception(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        expected = mean_over_ranks(model, world, (0, 1, 2, 3))
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=30)
        for _ in range(2):
            ddp.zero_grad_buffer()
            with pytest.raises(KeyError), ddp.no_sync(), ddp.no_sync():
                raise KeyError("the user's own")
            with ddp.no_sync():
                loss_of(ddp, rank, 0).backward()
                with ddp.no_sync():
                    loss_of(ddp, rank, 1).backward()
                loss_of(ddp, rank, 2).backward()  # still inside the outer one
                assert ddp.reducer.next == 0, "a bucket left under no_sync"
            loss_of(ddp, rank, 3).backward()
            assert (ddp.reducer.next > 0) == (overlap or strategy == "optim_grads"), "no_sync did not end"
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), expected)
        del ddp  # else the next one shares its wire, and reduces in finalize


@ranks(2)
def test_forgetting_no_sync_costs_a_second_reduction_and_is_right(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        for forgetful in ([0, 1], [1]):
            model = make_net()
            expected = mean_over_ranks(model, world, (0, 1, 2))
            ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=30)
            for _ in range(3):
                ddp.zero_grad_buffer()
                for microbatch in (0, 1):
                    if rank in forgetful:
                        loss_of(ddp, rank, microbatch).backward()
                    else:
                        with ddp.no_sync():
                            loss_of(ddp, rank, microbatch).backward()
                loss_of(ddp, rank, 2).backward()
                finalize_model_grads([ddp])
                assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_everything_under_no_sync_is_reduced_by_finalize(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        expected = mean_over_ranks(model, world, (0, 1))
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=30)
        for _ in range(3):
            ddp.zero_grad_buffer()
            with ddp.no_sync():
                loss_of(ddp, rank, 0).backward()
                loss_of(ddp, rank, 1).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_finish_grad_sync_is_idempotent(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        plain = copy.deepcopy(model)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=30)
        for step in range(3):
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, step).backward()
            expected = mean_over_ranks(plain, world, (step,))
            for _ in range(3):
                ddp.finish_grad_sync()
                assert_same(whole_grads(ddp), expected)
            ddp.start_grad_sync()
            ddp.finish_grad_sync()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), expected)
            if strategy == "no_shard":
                assert_same({name: param.grad for name, param in ddp.module.named_parameters()}, expected)


@ranks(3)
def test_start_grad_sync_early_and_a_backward_after_it(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        for late_on in ([0, 1, 2], [1], []):
            model = make_net()
            once, twice = mean_over_ranks(model, world, (0,)), mean_over_ranks(model, world, (0, 1))

            ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=30)
            late = {name: torch.zeros_like(grad) if not late_on else twice[name] - grad for name, grad in once.items()}
            if late_on == [1]:
                only = copy.deepcopy(model)
                for param in only.parameters():
                    param.grad = None
                loss_of(only, 1, 1).backward()
                late = {name: param.grad / world for name, param in only.named_parameters()}
            expected = {name: once[name] + late[name] for name in once}
            for _ in range(3):
                ddp.zero_grad_buffer()
                with ddp.no_sync():
                    loss_of(ddp, rank, 0).backward()
                ddp.start_grad_sync()
                ddp.start_grad_sync()
                if rank in late_on:
                    loss_of(ddp, rank, 1).backward()
                finalize_model_grads([ddp])
                assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_start_grad_sync_before_any_backward(rank: int, world: int) -> None:
    """All of the step's gradients are late then."""
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        expected = mean_over_ranks(model, world)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=30)
        for _ in range(2):
            ddp.zero_grad_buffer()
            ddp.start_grad_sync()
            loss_of(ddp, rank, 0).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), expected)


@ranks(2, 4)
def test_force_all_reduce_leaves_whole_gradients_on_every_rank(rank: int, world: int) -> None:
    instances = world // 2
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    for overlap in (False, True):
        model = make_net()
        plain = copy.deepcopy(model)
        ddp = wrap(
            model,
            use_distributed_optimizer=True,
            num_distributed_optimizer_instances=instances,
            overlap_grad_reduce=overlap,
            bucket_size=30,
        )
        for step in range(4):
            ddp.zero_grad_buffer()
            expected = mean_over_ranks(plain, world, (step,))
            forced = step % 2 == 1
            if forced:
                with ddp.no_sync():
                    loss_of(ddp, rank, step).backward()
            else:
                loss_of(ddp, rank, step).backward()
            finalize_model_grads([ddp], force_all_reduce=forced)
            if forced:  # without any gather, on every rank
                assert_same({name: param.main_grad for name, param in ddp.module.named_parameters()}, expected)
                assert all(param.grad is param.main_grad for param in ddp.parameters())
            else:  # asked for once, and not for ever
                assert all(isinstance(param.grad, GradPlaceholder) for param in ddp.parameters())
            assert_same(whole_grads(ddp), expected)


@ranks(2, timeout_s=20)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_whole_gradients_that_one_rank_asks_for_are_left_on_all(rank: int, world: int, strategy: str) -> None:
    """Also where backward has reduce-scattered buckets, on one rank only: it has no gradient of them on the other."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=30)
    for asks in (0, 1):
        ddp.zero_grad_buffer()
        if rank == 0:
            loss_of(ddp, rank, 0).backward()
        else:
            with ddp.no_sync():
                loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp], force_all_reduce=rank == asks)
        assert_same(
            {name: param.grad for name, param in ddp.module.named_parameters()}, mean_over_ranks(make_net(), world)
        )
    ddp.zero_grad_buffer()
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    assert not any(bucket.step.is_full_grad for bucket in ddp.reducer.buckets)


@ranks(2)
def test_buckets_leave_in_backward_from_the_first_batch_on(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in ("no_shard", "optim", "optim_grads"):
        ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=1)
        for _ in range(2):
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, 0).backward()
            assert ddp.reducer.next == len(ddp.reducer.buckets) == 7
            finalize_model_grads([ddp])
        del ddp  # else the next one shares its wire, and reduces in finalize


@ranks(2)
def test_without_overlap_backward_sends_nothing(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net())
    if rank == 0:  # alone: a collective inside would wait for ever
        loss_of(ddp, rank, 0).backward()
    dist.barrier()
    assert ddp.reducer.next == 0
    finalize_model_grads([ddp])

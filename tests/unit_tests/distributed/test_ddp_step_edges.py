"""Where one step ends and the next begins: zeroing, freezing, forgetting, asking twice, asking early."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, SyncError, finalize_model_grads
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

SETTINGS = [(strategy, overlap) for strategy in ("no_shard", "optim", "optim_grads") for overlap in (False, True)]


def by_torch_optimizer(ddp: DistributedDataParallel) -> None:
    torch.optim.SGD(ddp.parameters(), lr=0.1).zero_grad(set_to_none=True)


def by_torch_optimizer_keeping(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad_buffer()
    torch.optim.SGD(ddp.parameters(), lr=0.1).zero_grad(set_to_none=False)


def by_hand(ddp: DistributedDataParallel) -> None:
    for param in ddp.parameters():
        param.grad = None


def by_module_zero_grad(ddp: DistributedDataParallel) -> None:
    ddp.module.zero_grad()


def by_zero_grad(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad()


def by_replacing(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad_buffer()
    for param in ddp.parameters():
        param.grad = torch.zeros_like(param)


def by_replacing_some(ddp: DistributedDataParallel) -> None:
    """On a part of the parameters only."""
    ddp.zero_grad_buffer()
    for number, param in enumerate(ddp.parameters()):
        if number % 2:
            param.grad = None if number % 4 == 1 else torch.zeros_like(param)


@ranks(2)
@pytest.mark.parametrize(
    "zero",
    [
        by_torch_optimizer,
        pytest.param(by_torch_optimizer_keeping, marks=pytest.mark.nightly),
        by_hand,
        pytest.param(by_module_zero_grad, marks=pytest.mark.nightly),
        by_zero_grad,
        by_replacing,
        by_replacing_some,
    ],
)
@pytest.mark.in_suite(3)
def test_every_way_of_zeroing_begins_a_new_step(
    rank: int, world: int, zero: Callable[[DistributedDataParallel], None]
) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        for only_on_rank_1 in (False, True):
            model = make_net()
            plain = copy.deepcopy(model)
            ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=30)
            for step in range(4):
                if rank == 1 or not only_on_rank_1:
                    zero(ddp)
                else:
                    ddp.zero_grad_buffer()
                with ddp.no_sync():
                    loss_of(ddp, rank, 2 * step).backward()
                loss_of(ddp, rank, 2 * step + 1).backward()
                finalize_model_grads([ddp])
                assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (2 * step, 2 * step + 1)))
                for param in ddp.parameters():
                    assert (param.grad is not None and param.grad is param.main_grad) == (strategy == "no_shard")


@ranks(2)
def test_clearing_one_gradient_between_microbatches_is_what_the_user_said(rank: int, world: int) -> None:
    """p.grad = None after the first microbatch: for that parameter the second one alone counts."""
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        both, second = mean_over_ranks(model, world, (0, 1)), mean_over_ranks(model, world, (1,))
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=30)
        for _ in range(2):
            ddp.zero_grad_buffer()
            with ddp.no_sync():
                loss_of(ddp, rank, 0).backward()
            ddp.module.second.weight.grad = None
            loss_of(ddp, rank, 1).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), {**both, "second.weight": second["second.weight"]})


@ranks(2)
def test_a_gradient_of_the_users_own_is_reduced_in_its_place(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in ("no_shard", "optim", "optim_grads"):
        ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy)
        for step in range(2):
            ddp.zero_grad_buffer()
            for param in ddp.parameters():
                param.grad = torch.full_like(param, 1.0 + 2 * rank + step)
            finalize_model_grads([ddp])
            expected = {name: torch.full_like(p, 2.0 + step) for name, p in ddp.module.named_parameters()}
            assert_same(whole_grads(ddp), expected)


def thaw_nothing(model: nn.Module) -> None:
    model.third.weight.requires_grad_(False)
    model.norm.bias.requires_grad_(False)


@ranks(2)
def test_freezing_after_the_wrap_on_all_ranks_leaves_zeros_and_thawing_them_works_again(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        for zero in (by_hand, DistributedDataParallel.zero_grad_buffer):
            model = make_net()
            full = mean_over_ranks(model, world)
            ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=30)
            frozen = {"third.weight", "norm.bias"}
            for step in range(6):
                for name, param in ddp.module.named_parameters():
                    param.requires_grad_(name not in frozen or step not in (2, 3))
                zero(ddp)
                loss_of(ddp, rank, 0).backward()
                finalize_model_grads([ddp])
                expected = {
                    name: torch.zeros_like(grad) if name in frozen and step in (2, 3) else grad
                    for name, grad in full.items()
                }
                assert_same(whole_grads(ddp), expected)
                for name, param in ddp.module.named_parameters():
                    if name in frozen and step in (2, 3):
                        assert param.grad is None  # an optimizer leaves it alone: no weight decay, no momentum


@ranks(3)
@pytest.mark.parametrize("overlap", [False, True])
def test_freezing_on_one_rank_only_is_refused_by_name_on_all(rank: int, world: int, overlap: bool) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in ("no_shard", "optim", "optim_grads"):
        ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=30)
        if rank == 1:
            ddp.module.norm.weight.requires_grad_(False)
        loss_of(ddp, rank, 0).backward()
        with pytest.raises(SyncError, match=r"'norm.weight' is frozen on ranks \[1\]"):
            finalize_model_grads([ddp])


@ranks(3)
@pytest.mark.parametrize("overlap", [False, True])
def test_unfreezing_what_was_frozen_at_wrap_is_refused_by_name_on_all(rank: int, world: int, overlap: bool) -> None:
    parallel_state.initialize_model_parallel()
    for where in ([0, 1, 2], [2]):
        model = make_net()
        model.second.weight.requires_grad_(False)
        plain = copy.deepcopy(model)
        ddp = wrap(model, overlap_grad_reduce=overlap, bucket_size=30)
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        expected = mean_over_ranks(plain, world)
        del expected["second.weight"]  # frozen: it has no place in a buffer
        assert_same(whole_grads(ddp), expected)
        assert model.second.weight.grad is None
        ddp.zero_grad_buffer()
        if rank in where:
            model.second.weight.requires_grad_(True)
        loss_of(ddp, rank, 1).backward()
        with pytest.raises(SyncError, match=r"rank [02]: parameter 'second.weight' was frozen when"):
            finalize_model_grads([ddp])


@ranks(2)
def test_finalize_twice_is_refused_and_changes_nothing(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        expected = mean_over_ranks(model, world)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        for _ in range(2):
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, 0).backward()
            finalize_model_grads([ddp])
            with pytest.raises(SyncError, match="called twice"):
                finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_the_sum_of_a_reduced_gradient_and_a_new_one_is_refused_by_name_on_all_ranks(rank: int, world: int) -> None:
    """Adding to a sum that was divided by the tokens, and reducing again, would divide a part of it twice."""
    from types import SimpleNamespace

    parallel_state.initialize_model_parallel()
    for overlap in (False, True):
        ddp = wrap(make_net(), SimpleNamespace(calculate_per_token_loss=True), overlap_grad_reduce=overlap)
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp], num_tokens=torch.tensor(4))
        loss_of(ddp, rank, 1).backward()
        with pytest.raises(SyncError, match="rank [01]: gradients came while that of 'first.weight', already reduced"):
            finalize_model_grads([ddp], num_tokens=torch.tensor(4))
        ddp.zero_grad_buffer()
        expected = mean_over_ranks(ddp.module, world, (2,))
        loss_of(ddp, rank, 2).backward()
        finalize_model_grads([ddp], num_tokens=torch.tensor(4))
        assert_same(whole_grads(ddp), {name: grad / 4 for name, grad in expected.items()})


@ranks(2)
def test_gradients_that_were_never_finalized_are_dropped_by_zeroing(rank: int, world: int) -> None:
    """Some ranks of one step may have launched nothing, others everything: the next step is right all the same."""
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        plain = copy.deepcopy(model)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=1)
        for step in range(4):
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, 50 + step).backward()
            if step == 2:
                ddp.start_grad_sync()
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, step).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (step,)))


@ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
@pytest.mark.parametrize("uses", ["a step", "clipping"])
def test_a_sharded_gradient_that_outlives_its_wrapper_says_what_to_do(
    rank: int, world: int, strategy: str, uses: str
) -> None:
    """A plain loop on the module, after some steps in a wrapper: what the message says works, on this rank alone."""
    parallel_state.initialize_model_parallel()
    model = make_net()
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    del ddp
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, rank, 1).backward()
    with pytest.raises(SyncError, match="'first.weight', which is gone: .* is deleted. Call model.zero_grad()"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) if uses == "clipping" else optimizer.step()
    model.zero_grad()
    loss_of(model, rank, 1).backward()
    alone = make_net()
    loss_of(alone, rank, 1).backward()
    assert_same(*({name: p.grad for name, p in net.named_parameters()} for net in (model, alone)))
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    ddp.zero_grad_buffer()
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    assert_same(whole_grads(ddp), mean_over_ranks(make_net(), world))

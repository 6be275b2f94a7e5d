"""Two models on one data group, finalized in another order on one rank: refused by both models' names, on all ranks."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, SyncError, finalize_model_grads
from core.distributed.reduce.model_order import ModelOrder
from core.groups.process_groups import ProcessGroups
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

EQUAL, DIFFERENT = (6, 6), (6, 4000)


class Pair(nn.Module):
    """One parameter, and its gradient for a rank is the rank's number plus one."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.zeros(size)))

    def forward(self, factor: float) -> torch.Tensor:
        return sum(param.sum() for param in self.parameters()) * factor


def train(ddp: DistributedDataParallel, rank: int) -> None:
    ddp.zero_grad_buffer()
    ddp(1.0 + rank).backward()


def assert_mean(ddp: DistributedDataParallel, world: int) -> None:
    (param,) = ddp.parameters()
    assert param.main_grad.tolist() == [(1 + world) / 2] * param.numel()


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("sizes", [EQUAL, DIFFERENT])
@pytest.mark.in_suite()
def test_models_finalized_in_another_order_are_refused_by_name_on_every_rank(
    rank: int, world: int, sizes: tuple[int, int], share: bool
) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap, together in itertools.product(("no_shard", "optim_grads"), (False, True), (False, True)):
        options = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": overlap}
        policy = wrap(Pair("policy", sizes[0]), share_host_memory=share, **options)
        critic = wrap(Pair("critic", sizes[1]), share_host_memory=share, **options)
        train(policy, rank), train(critic, rank)
        begun = time.monotonic()
        with pytest.raises(SyncError, match=r"'policy'.*on ranks \[0\].*'critic'.*on ranks \[1\].*in one order"):
            if together:  # the last one of a list is reduced first
                finalize_model_grads([critic, policy] if rank == 0 else [policy, critic])
            else:
                finalize_model_grads([policy if rank == 0 else critic])
        assert time.monotonic() - begun < 10.0
        for _ in range(2):  # nothing of it is left on the wire
            train(policy, rank), train(critic, rank)
            finalize_model_grads([critic])
            finalize_model_grads([policy])
            if strategy == "no_shard":
                assert_mean(policy, world), assert_mean(critic, world)


@ranks(2)
def test_a_group_without_a_gloo_twin_knows_the_order_too(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    groups = ProcessGroups(dp_cp=dist.new_group(), pp=dist.new_group([rank], use_local_synchronization=True))
    policy, critic = (
        wrap(Pair(name, size), pg_collection=groups, share_host_memory=False)
        for name, size in zip(("policy", "critic"), DIFFERENT, strict=True)
    )
    train(policy, rank), train(critic, rank)
    with pytest.raises(SyncError, match="'policy'.*'critic'"):
        finalize_model_grads([policy if rank == 0 else critic])


@ranks(2)
def test_reductions_that_were_launched_crosswise_are_reported_by_the_agreement(rank: int, world: int) -> None:
    """Where ranks cannot ask each other beforehand: no gloo at all."""
    parallel_state.initialize_model_parallel()
    policy, critic = (wrap(Pair(name, 6), share_host_memory=False) for name in ("policy", "critic"))
    ModelOrder.of(policy.groups.require("dp_cp")).living = None
    train(policy, rank), train(critic, rank)
    with pytest.raises(SyncError, match=rf"'{'policy' if rank == 0 else 'critic'}'.*another model.*in one order"):
        finalize_model_grads([policy if rank == 0 else critic])


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_a_start_of_models_in_another_order_mixes_nothing(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    models = [wrap(Pair(name, 6), share_host_memory=share) for name in ("policy", "critic")]
    for ddp in models:
        train(ddp, rank + 10 * models.index(ddp))
    for ddp in models if rank == 0 else reversed(models):
        ddp.start_grad_sync()
    finalize_model_grads(models)
    for number, ddp in enumerate(models):
        (param,) = ddp.parameters()
        assert param.main_grad.tolist() == [1.5 + 10 * number] * 6


@ranks(2)
def test_deleted_models_leave_the_order_of_the_others_known(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    gone = wrap(Pair("gone", 5), share_host_memory=False)
    policy = wrap(Pair("policy", 6), share_host_memory=False)
    del gone
    for _ in range(2):
        train(policy, rank)
        finalize_model_grads([policy])
        assert_mean(policy, world)
    critic = wrap(Pair("critic", 6), share_host_memory=False)
    train(policy, rank), train(critic, rank)
    with pytest.raises(SyncError, match="'policy'.*'critic'"):
        finalize_model_grads([policy if rank == 0 else critic])
    del policy
    train(critic, rank)
    finalize_model_grads([critic])
    assert_mean(critic, world)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads"])
def test_buckets_leave_in_backward_while_no_other_model_uses_the_group(rank: int, world: int, strategy: str) -> None:
    """A model that comes counts at once, in the middle of a step too. One that goes counts until the next backward,
    and where backward waits for other ranks until ranks have asked each other.
    """
    parallel_state.initialize_model_parallel()
    options = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": True}
    policy = wrap(Pair("policy", 6), **options)
    group = policy.groups.dp_cp

    def launched() -> int:
        policy(1.0 + rank).backward()
        found = policy.reducer.next
        finalize_model_grads([policy])
        policy.zero_grad_buffer()
        return found

    assert launched() == 1
    critic = wrap(Pair("critic", 6), **options)  # policy's step has begun
    assert launched() == 0
    assert launched() == 0
    del critic
    if strategy == "no_shard":
        ModelOrder.of(group).living = None  # as where ranks have no group to ask each other on
        assert launched() == 1
    else:
        ModelOrder.of(group).finish_begun_steps(policy.groups.control("dp_cp"))  # as a further wrap does first
        assert launched() == 1

"""Edits of reduced gradients that the ranks do not share: refused on all ranks, in every sharding strategy."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import SyncError, finalize_model_grads
from core.optimizer import GradScaler, OptimizerConfig, get_megatron_optimizer
from core.optimizer.norm import clip_grads
from tests.unit_tests.distributed.test_ddp_grad_rules import STRATEGIES, clip_by_torch, drop_one, weights
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, wrap


def replace_one(model: nn.Module) -> None:
    model.second.weight.grad = torch.ones_like(model.second.weight.grad)


def negate_in_place(model: nn.Module) -> None:
    model.third.bias.grad.neg_()  # which leaves the norm as it was


@ranks(3)
@pytest.mark.parametrize("when", ["after finalize", "after finish_grad_sync", "before a GradScaler"])
@pytest.mark.parametrize("edit", [replace_one, negate_in_place, drop_one, clip_by_torch])
@pytest.mark.in_suite(6)
def test_an_edit_that_ranks_do_not_share_is_refused_on_all_ranks(rank: int, world: int, edit: Any, when: str) -> None:
    """As in a sharded strategy: a rank that clips, or repairs, gradients alone would train its own copy."""
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        if when != "after finalize" and strategy != "no_shard":
            continue
        model = make_net()
        ddp = wrap(model, data_parallel_sharding_strategy=strategy)
        config = OptimizerConfig(optimizer="sgd", lr=0.01, clip_grad=0.0)
        optimizer = get_megatron_optimizer(config, [ddp])
        scaler = GradScaler("cpu", init_scale=4.0, enabled=when == "before a GradScaler")
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(ddp, rank, step)).backward()
            if when == "after finish_grad_sync":
                ddp.finish_grad_sync()
            else:
                finalize_model_grads([ddp], force_all_reduce=True)
            before = weights(model)
            if step == 2 and rank == 1:
                edit(ddp.module)
            if when == "after finish_grad_sync":
                finalize_model_grads([ddp])
            for _ in range(0 if step != 2 else 1 if scaler.is_enabled() else 2):
                with pytest.raises(
                    SyncError, match=r"step was not made: .*'[\w.]+'.* group 'dp_cp'.*equally on all data"
                ):
                    scaler.step(optimizer)
                assert_same(weights(model), before)
            if step != 2:
                scaler.step(optimizer)
                scaler.update()
                assert weights(model)["third.bias"].sub(before["third.bias"]).norm() > 1e-3
        everyone = [torch.empty_like(model.second.weight) for _ in range(world)]
        dist.all_gather(everyone, model.second.weight.detach())
        assert all(torch.equal(theirs, everyone[0]) for theirs in everyone)


@ranks(2)
def test_a_zero_gradient_that_one_rank_drops_is_refused(rank: int, world: int) -> None:
    """Weight decay would move the parameter on the other ranks alone."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net())
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1, weight_decay=0.1), [ddp])
    (loss_of(ddp, rank, 0) * 0).backward()
    finalize_model_grads([ddp])
    if rank == 0:
        drop_one(ddp.module)
    with pytest.raises(SyncError, match=r"'second.weight' was set to None on ranks \[0\] of group 'dp_cp' only"):
        optimizer.step()


@ranks(2)
def test_steps_without_edits_compare_nothing(rank: int, world: int) -> None:
    """The comparison reads all gradients, which a program that edits none does not pay for."""
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.01, clip_grad=1.0), [ddp])
        for scaler in (GradScaler("cpu", init_scale=4.0, enabled=enabled) for enabled in (False, True)):
            with mock.patch.object(clip_grads, "refuse_unshared_edits", side_effect=AssertionError):
                for step in range(2):
                    optimizer.zero_grad()
                    scaler.scale(loss_of(ddp, rank, step)).backward()
                    finalize_model_grads([ddp])
                    scaler.step(optimizer)
                    scaler.update()

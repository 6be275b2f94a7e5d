"""Calls in another order than a plain step's: several finalizes, a clip or an edit in between, a save in the middle."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import SyncError, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.distributed.test_ddp_grad_rules import STRATEGIES, Branches, torch_adamw, weights
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

SHARDED = [
    {"data_parallel_sharding_strategy": "optim"},
    {"data_parallel_sharding_strategy": "optim_grads"},
    {"data_parallel_sharding_strategy": "optim_grads", "reduce_microbatches": "every"},
]


def sgd(ddp: Any, **options: Any) -> Any:
    config = OptimizerConfig(
        **{"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.5, "clip_grad": 0.0, "weight_decay": 0.0, **options}
    )
    return get_megatron_optimizer(config, [ddp], config_overrides={})


def stepped(model: nn.Module, grads: dict[str, torch.Tensor], factor: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: param.detach() - 0.5 * factor * grads[name] for name, param in model.named_parameters()}


@ranks(2)
def test_a_gradient_that_a_later_microbatch_does_not_add_to_stays(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    data = torch.randn(3, world, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for options in ({}, *SHARDED):
        model = Branches()
        plain = copy.deepcopy(model)
        ddp = wrap(model, **options)
        config = OptimizerConfig(lr=0.1, weight_decay=0.3, clip_grad=0.0)
        optimizer, reference = get_megatron_optimizer(config, [ddp], config_overrides={}), torch_adamw(plain)
        for _ in range(2):
            optimizer.zero_grad()
            reference.zero_grad()
            for microbatch, used in enumerate([(0, 1, 2), (0, 1), (0,)]):
                ddp(data[microbatch, rank], used).backward()
                finalize_model_grads([ddp])
                (sum(plain(data[microbatch, r], used) for r in range(world)) / world).backward()
            optimizer.step()
            reference.step()
        assert_same(weights(model), weights(plain), rtol=1e-9)
        del ddp, optimizer


@ranks(2)
def test_zero_grad_drops_gradients_of_earlier_finalizes_too(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for options in SHARDED:
        ddp = wrap(make_net(), **options)
        expected = mean_over_ranks(ddp.module, world, (2,))
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        loss_of(ddp, rank, 1).backward()
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, 2).backward()
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), expected)
        del ddp


@ranks(2)
def test_a_step_that_would_leave_out_earlier_gradients_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for options in SHARDED[:2]:
        ddp = wrap(make_net(), **options)
        optimizer = sgd(ddp)
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        loss_of(ddp, rank, 1).backward()
        ddp.finish_grad_sync()
        with pytest.raises(SyncError, match="Call finalize_model_grads"):
            optimizer.step()
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), mean_over_ranks(ddp.module, world, (0, 1)))
        del ddp, optimizer


@ranks(2)
def test_saving_a_step_that_adds_to_earlier_gradients_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), **SHARDED[2])
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    loss_of(ddp, rank, 1).backward()
    with pytest.raises(SyncError, match="which are not saved"):
        ddp.reduced_so_far()


@ranks(2)
def test_a_parameter_used_before_a_save_only_is_stepped_after_it(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    data = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    first = Branches()
    before = wrap(copy.deepcopy(first), **SHARDED[2])
    before(data[0], (0, 1)).backward()
    saved = before.reduced_so_far()
    before.zero_grad_buffer()
    del before
    model = copy.deepcopy(first)
    ddp = wrap(model, **SHARDED[2])
    optimizer = sgd(ddp)
    ddp.zero_grad_buffer()
    ddp.restore_reduced(saved)
    ddp(data[1], (0,)).backward()
    finalize_model_grads([ddp])
    optimizer.step()
    (first(data[0], (0, 1)) + first(data[1], (0,))).backward()
    used = {name: param for name, param in first.named_parameters() if param.grad is not None}
    assert len(used) == 4
    expected = {name: param.detach() - 0.5 * param.grad for name, param in used.items()}
    assert_same({name: value for name, value in weights(model).items() if name in used}, expected, rtol=1e-9)


@ranks(2)
def test_clipping_before_the_step_counts_and_the_lowest_limit_wins(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        for limits in ((0.01,), (0.01, 1.0), (1.0, 0.01)):
            model = make_net()
            grads = mean_over_ranks(model, world)
            norm = float(torch.stack([grad.norm() for grad in grads.values()]).norm())
            expected = stepped(model, grads, 0.01 / norm)
            ddp = wrap(model, data_parallel_sharding_strategy=strategy)
            optimizer = sgd(ddp)
            loss_of(ddp, rank, 0).backward()
            finalize_model_grads([ddp])
            optimizer.prepare_grads()
            for limit in limits:
                assert optimizer.clip_grad_norm(limit) == pytest.approx(norm)
            optimizer.step()
            assert_same(weights(model), expected, rtol=1e-6)
            del ddp, optimizer


@ranks(1)
def test_a_gradient_divided_by_tokens_is_not_added_to_on_one_rank_either(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), SimpleNamespace(calculate_per_token_loss=True))
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp], num_tokens=4)
    loss_of(ddp, rank, 1).backward()  # a loop may drop it
    with pytest.raises(SyncError, match="gradients came while that of 'first.weight', already reduced, was still in"):
        finalize_model_grads([ddp], num_tokens=4)


@ranks(2)
def test_edits_are_followed_through_scaling_and_finish_grad_sync(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for early in (False, True):
        model = make_net()
        expected = stepped(model, mean_over_ranks(model, world), 1.5)
        ddp = wrap(model)
        optimizer = sgd(ddp)
        loss_of(ddp, rank, 0).backward()
        if early:
            ddp.finish_grad_sync()
        else:
            finalize_model_grads([ddp])
        for param in model.parameters():
            param.grad = param.grad * 3
        ddp.scale_gradients(0.5)
        if early:
            finalize_model_grads([ddp])
        optimizer.step()
        assert_same(weights(model), expected)


@ranks(2)
def test_a_backward_between_measuring_and_stepping_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy)
        optimizer = sgd(ddp)
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        optimizer.prepare_grads()
        loss_of(ddp, rank, 1).backward()
        with pytest.raises(SyncError, match="its gradients are not reduced"):
            optimizer.step_with_ready_grads()


@ranks(2)
def test_a_copy_used_on_one_tensor_parallel_rank_without_a_rule_is_refused_on_all(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    ddp = wrap(Branches())
    data = torch.ones(5, 4, dtype=torch.float64)
    ddp(data, (0, 1) if rank == 0 else (0,)).backward()
    with pytest.raises(
        SyncError, match=r"'layers.1.(weight|bias)' got no gradient on ranks \[1\] and .*declare_gradient"
    ):
        finalize_model_grads([ddp])

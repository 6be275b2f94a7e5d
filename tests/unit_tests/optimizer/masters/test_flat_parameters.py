"""Replicated parameters are moved into one tensor a bucket, and no one notices but the clock."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import Net, batch, loss_of, make_net, train, wrap

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0}


def reference_steps(model: Net, world: int, numbers: range, decays: Any = lambda p: p.dim() > 1) -> None:
    """torch's AdamW, not fused, over the mean of all ranks' gradients."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if decays(p)], "weight_decay": 0.1},
        {"params": [p for p in params if not decays(p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False, fused=False)
    for number in numbers:
        optimizer.zero_grad()
        for rank in range(world):
            (loss_of(model, rank, number) / world).backward()
        optimizer.step()


def assert_equal_weights(model: nn.Module, reference: nn.Module, start: nn.Module) -> None:
    for name, want in reference.named_parameters():
        assert torch.allclose(model.get_parameter(name), want, rtol=1e-4, atol=1e-6), name
        assert (want - start.get_parameter(name)).abs().max() > 1e-3, "the reference has not moved"


@ranks(1, 2)
def test_one_long_run_makes_the_steps_of_torch(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    start = make_net(torch.float32, width=64)
    reference, model = copy.deepcopy(start), copy.deepcopy(start)
    params = list(model.parameters())
    ddp = wrap(model)
    optimizer = get_megatron_optimizer(OptimizerConfig(**ADAMW), [ddp], no_weight_decay_cond=lambda name, param: False)
    # The last layer's 3 biases and 33 weights do not fill vectors, everything before does.
    assert [segment.numel for masters in optimizer.masters for segment in masters.segments] == [3, 33, 1216]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3]
    assert all(mine is its for mine, its in zip(params, model.parameters(), strict=True)), "other objects"
    assert len({param.untyped_storage().data_ptr() for param in params}) == 1
    for param, before in zip(params, start.parameters(), strict=True):
        assert param.shape == before.shape and param.is_contiguous() and torch.equal(param, before)
    train(ddp, optimizer, rank, *range(3))
    reference_steps(reference, world, range(3), decays=lambda param: True)
    assert_equal_weights(model, reference, start)


@ranks(1)
def test_memory_that_another_program_uses_stays_where_it_is(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    start = make_net(torch.float32)
    for what in ("two of one tensor", "not contiguous", "shared between processes"):
        reference, model = copy.deepcopy(start), copy.deepcopy(start)
        if what == "two of one tensor":
            both = torch.cat([model.norm.weight.data, model.norm.bias.data])
            model.norm.weight.data, model.norm.bias.data = both[:7], both[7:]
        elif what == "not contiguous":
            model.second.weight.data = model.second.weight.data.t().contiguous().t()
        else:
            model.third.bias.share_memory_()
        addresses = [param.data_ptr() for param in model.parameters()]
        ddp = wrap(model)
        optimizer = get_megatron_optimizer(OptimizerConfig(**ADAMW), [ddp])
        assert [param.data_ptr() for param in model.parameters()] == addresses, what
        train(ddp, optimizer, rank, *range(3))
        reference_steps(reference, world, range(3))
        assert_equal_weights(model, reference, start)
        assert [param.data_ptr() for param in model.parameters()] == addresses, what


@ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_was_given_other_memory_is_stepped_from_its_values(
    rank: int, world: int, dtype: torch.dtype
) -> None:
    """As people swap averaged weights in and out: `param.data = other`."""
    parallel_state.initialize_model_parallel()
    model = make_net(dtype)
    ddp = wrap(model, grad_reduce_in_fp32=True)
    optimizer = get_megatron_optimizer(OptimizerConfig(bf16=dtype is torch.bfloat16, **ADAMW), [ddp])
    train(ddp, optimizer, rank, *range(1))
    twin = make_net(dtype)
    twin_ddp = wrap(twin, grad_reduce_in_fp32=True)
    twin_optimizer = get_megatron_optimizer(OptimizerConfig(bf16=dtype is torch.bfloat16, **ADAMW), [twin_ddp])
    train(twin_ddp, twin_optimizer, rank, *range(1))

    home = model.second.weight.data_ptr()
    model.second.weight.data = model.second.weight.data + 1
    twin.second.weight.data.add_(1)
    for each in (optimizer, twin_optimizer):
        each.reload_model_params()
    model.third.weight.data = model.third.weight.data.clone()  # and one that no one reloads
    train(ddp, optimizer, rank, *range(1, 3))
    train(twin_ddp, twin_optimizer, rank, *range(1, 3))
    assert model.second.weight.data_ptr() == home
    for name, want in twin.named_parameters():
        assert torch.equal(model.get_parameter(name), want), name


@ranks(1)
def test_parameters_that_have_exchanged_their_memory_keep_what_they_were_given(rank: int, world: int) -> None:
    """`a.data, b.data = b.data, a.data`: the source of each is the home of another."""
    parallel_state.initialize_model_parallel()
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    ddp = wrap(model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.5, clip_grad=0.0, weight_decay=0.0), [ddp])
    a, b, c = model.parameters()
    homes = [param.data_ptr() for param in (a, b, c)]
    reference = copy.deepcopy(nn.Sequential(model[1], model[2], model[0]))
    a.data, b.data, c.data = b.data, c.data, a.data
    x = torch.arange(16.0).view(2, 8) / 16
    optimizer.zero_grad()
    ddp(x).sum().backward()
    finalize_model_grads([ddp])
    assert optimizer.step()[0]
    reference(x).sum().backward()
    assert [param.data_ptr() for param in (a, b, c)] == homes
    for got, want in zip((a, b, c), reference.parameters(), strict=True):
        assert (want - (want - 0.5 * want.grad)).abs().max() > 0.05
        torch.testing.assert_close(got.detach(), (want - 0.5 * want.grad).detach())


@ranks(1)
def test_a_second_optimizer_finds_the_parameters_where_the_first_has_put_them(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    start = make_net(torch.float32)
    model, reference = copy.deepcopy(start), copy.deepcopy(start)
    ddp = wrap(model)
    first = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.0), [ddp])
    addresses = [param.data_ptr() for param in model.parameters()]
    second = get_megatron_optimizer(OptimizerConfig(**ADAMW), [ddp])
    assert [param.data_ptr() for param in model.parameters()] == addresses
    train(ddp, second, rank, *range(2))
    reference_steps(reference, world, range(2))
    assert_equal_weights(model, reference, start)
    held = [
        segment.master.data_ptr()
        for each in (first, second)
        for masters in each.masters
        for segment in masters.segments
    ]
    assert held[: len(held) // 2] == held[len(held) // 2 :]


@ranks(1)
def test_a_graph_from_before_the_step_is_not_used_after_it(rank: int, world: int) -> None:
    """torch notices weights that were changed between forward and backward; a flat step must not hide it."""
    parallel_state.initialize_model_parallel()
    for dtype in (torch.float32, torch.bfloat16):
        model = make_net(dtype)
        ddp = wrap(model)
        optimizer = get_megatron_optimizer(OptimizerConfig(bf16=dtype is torch.bfloat16, **ADAMW), [ddp])
        x, _ = batch(rank, 9, dtype)
        old = model(x).sum()
        train(ddp, optimizer, rank, *range(1))
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()


@ranks(1, 3)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.in_suite()
def test_a_run_that_a_frozen_parameter_has_split_makes_the_same_bits(rank: int, world: int, strategy: str) -> None:
    """Kernels round what does not fill a vector differently, so the parts of a segment must end where vectors do."""
    parallel_state.initialize_model_parallel()
    for algorithm in ("sgd", "adam"):
        trained = []
        for splits in (False, True):
            model = make_net(torch.float32, width=64)
            ddp = wrap(model, data_parallel_sharding_strategy=strategy)
            config = OptimizerConfig(optimizer=algorithm, lr=1e-2, clip_grad=1.0, sgd_momentum=0.9)
            optimizer = get_megatron_optimizer(config, [ddp], no_weight_decay_cond=lambda name, param: False)
            whole = [segment for masters in optimizer.masters for segment in masters.segments]
            if splits:
                for masters in optimizer.masters:
                    masters.bucket.used[:] = b"\1" * len(masters.bucket.params)
                for trains in (False, True):
                    model.norm.weight.requires_grad_(trains)
                    for masters in optimizer.masters:
                        masters.follow_freezing(optimizer.optimizer)
                parts = [segment for masters in optimizer.masters for segment in masters.segments]
                assert len(parts) > len(whole) or (strategy == "optim" and world > 1)
            train(ddp, optimizer, rank, *range(4))
            trained.append({name: param.clone() for name, param in model.named_parameters()})
        for name, want in trained[0].items():
            assert torch.equal(trained[1][name], want), (algorithm, name)

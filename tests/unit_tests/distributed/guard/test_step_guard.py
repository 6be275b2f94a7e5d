"""An optimizer must not step on gradients that are not whole; a dropped step must not leak into the next one."""

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import SyncError, finalize_model_grads
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap


@ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_without_finalize_is_refused_and_with_it_allowed(rank: int, world: int, overlap: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), overlap_grad_reduce=overlap)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = [param.detach().clone() for param in ddp.parameters()]
    loss_of(ddp, rank, 0).backward()
    with pytest.raises(SyncError, match="SGD.step\\(\\) was called on gradients that were not reduced"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    finalize_model_grads([ddp])
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))


@ranks(2)
def test_other_optimizers_may_step_in_between(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    expected = mean_over_ranks(model, world)
    ddp = wrap(model)
    other = nn.Linear(2, 2)
    before = other.weight.detach().clone()
    other(torch.ones(1, 2)).sum().backward()
    loss_of(ddp, rank, 0).backward()
    torch.optim.SGD(other.parameters(), lr=0.5).step()
    torch.testing.assert_close(other.weight.detach(), before - 0.5)
    finalize_model_grads([ddp])
    assert_same({name: param.grad for name, param in model.named_parameters()}, expected)


@ranks(2)
def test_plain_data_parallelism_may_step_after_finish_grad_sync(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    expected = mean_over_ranks(model, world)
    ddp = wrap(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    loss_of(ddp, rank, 0).backward()
    ddp.finish_grad_sync()
    optimizer.step()
    assert_same({name: start[name] - param.detach() for name, param in model.named_parameters()}, expected, rtol=1e-9)


@ranks(2)
def test_a_deleted_wrapper_leaves_a_plain_module_that_can_be_wrapped_again(rank: int, world: int) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    parallel_state.initialize_model_parallel()
    before = len(_global_optimizer_pre_hooks)
    ddp = wrap(make_net())
    assert len(_global_optimizer_pre_hooks) == before + 1
    model = ddp.module
    with pytest.raises(ValueError, match="'first.weight' already belongs to another"):
        wrap(model)
    del ddp
    assert len(_global_optimizer_pre_hooks) == before
    expected = mean_over_ranks(model, world)
    again = wrap(model, overlap_grad_reduce=True)
    loss_of(again, rank, 0).backward()
    finalize_model_grads([again])
    assert_same(whole_grads(again), expected)


class TwoHeads(nn.Module):
    """Rank 0 uses both heads, the other ranks one: from the second step on their buckets leave at different times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(5, 6, dtype=torch.float64)
        self.heads = nn.ModuleList(nn.Linear(6, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        return sum((self.heads[i](hidden).pow(2).sum() for i in used), torch.zeros((), dtype=torch.float64))


def loss_with_heads(model: nn.Module, rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 10 * microbatch)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return model(x, [0, 1, 2] if rank == 0 else [rank % 3])


@ranks(3)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_a_dropped_step_does_not_leak_into_the_next(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    model = TwoHeads()
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=1)
    for step in range(6):
        ddp.zero_grad_buffer()
        loss_with_heads(ddp, rank, step).backward()
        if step % 3 == 2:
            continue  # drop this one: ranks have launched different numbers of buckets by now
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), mean_over_ranks(model, world, (step,), loss_with_heads))


def loss_with_other_heads(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """What is expected after one step is wrong in the next, on each rank in another way."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank + 10 * step), dtype=torch.float64)
    return model(x, [(rank + step) % 3])


@ranks(3)
def test_a_model_can_be_wrapped_while_anothers_step_is_under_way(rank: int, world: int) -> None:
    """Ranks have launched different numbers of buckets when the second wrap compares its models."""
    parallel_state.initialize_model_parallel()
    model = TwoHeads()
    ddp = wrap(model, overlap_grad_reduce=True, bucket_size=1)
    for step in range(3):
        ddp.zero_grad_buffer()
        loss_with_other_heads(ddp, rank, step).backward()
        if step == 2:
            other = wrap(make_net(), overlap_grad_reduce=True)
            loss_of(other, rank, 0).backward()
            finalize_model_grads([other])
            assert_same(whole_grads(other), mean_over_ranks(make_net(), world))
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), mean_over_ranks(model, world, (step,), loss_with_other_heads))


@ranks(3)
def test_ranks_that_are_at_different_steps_are_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net())
    if rank == 1:
        ddp.reducer.launches += 1  # as if a reduction of an earlier step had been left over here
    loss_of(ddp, rank, 0).backward()
    with pytest.raises(SyncError, match="have launched 1 to 2 reductions"):
        finalize_model_grads([ddp])


@ranks(2)
def test_local_steps_inside_the_wrapper_are_refused_with_what_to_do(rank: int, world: int) -> None:
    """Local SGD: each rank makes steps of its own, and weights are averaged at times."""
    parallel_state.initialize_model_parallel()
    model = wrap(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(SyncError, match=r"as in local SGD, train the module without the wrapper and average"):
        optimizer.step()

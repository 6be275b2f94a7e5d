"""Weights that a forward saves for its backward, and what is written meanwhile."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from core import parallel_state
from core.distributed import SyncError, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.distributed.sharded.test_hidden_parameters import Tower
from tests.unit_tests.distributed.sharded.test_sharded_parameters import SGD, WRITTEN, Model, loss_of, sharded
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap


class Gate(torch.autograd.Function):
    """Saves three weights at once, more than the window, and looks at their signs in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        one, two, three = weights
        return x @ one.abs() @ two.abs() @ three.abs()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, one, two, three = ctx.saved_tensors
        last = grad @ three.abs().T
        first = last @ two.abs().T
        return (
            first @ one.abs().T,
            x.T @ first * one.sign(),
            (x @ one.abs()).T @ last * two.sign(),
            (x @ one.abs() @ two.abs()).T @ grad * three.sign(),
        )


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(24, 24) / 5) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Gate.apply(x, *list(self.weights)[:3])
        return checkpoint(lambda y, weight: (y @ weight.abs()).tanh(), x, self.weights[3], use_reentrant=False)


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_a_weight_that_is_saved_as_itself_has_its_values_in_backward(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    seen = []
    for strategy in ("optim_grads", "optim_grads_params"):
        model = Gated()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        options = {"bucket_size": 300, "reduce_microbatches": "every", "share_host_memory": share}
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, **options)
        optimizer = get_megatron_optimizer(OptimizerConfig(clip_grad=0.0, **SGD), [ddp])
        for step in range(2):
            optimizer.zero_grad()
            loss = ddp(torch.randn(5, 24, generator=torch.Generator().manual_seed(rank + 9 * step))).sum()
            with ddp.gathered():  # a penalty, as outside of any forward
                loss = loss + sum(weight.abs().sum() + weight.clamp(min=0.1).pow(2).sum() for weight in model.weights)
            loss.backward()
            finalize_model_grads([ddp])
            assert optimizer.step()[0]
        seen.append(ddp.state_dict())
    for name, value in seen[0].items():
        assert torch.equal(value, seen[1][name]) and (value - start[name]).abs().min() > 0, name


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_a_write_between_a_forward_and_its_backward_is_seen(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Gated(), share_host_memory=share)
    with ddp.gathered():
        loss = ddp(torch.ones(5, 24)).sum()
        with torch.no_grad():
            ddp.module.weights[1].mul_(1.5)
        with pytest.raises(RuntimeError, match=WRITTEN[share]):
            loss.backward()
    with ddp.gathered():
        views = [weight.view(-1) for weight in ddp.module.weights]
    with torch.no_grad():
        views[0].mul_(2)
    with pytest.raises(SyncError, match="was written, or given other memory, while it was not gathered"):
        ddp(torch.ones(5, 24))


@ranks(2)
def test_hooks_of_others_around_the_forward_are_refused_where_weights_move(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Gated(), share_host_memory=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        with pytest.raises(SyncError, match="inside other saved-tensor hooks"):
            ddp(torch.ones(5, 24))
        with torch.no_grad():
            ddp(torch.ones(5, 24))
    loss_before = float(ddp(torch.ones(5, 24)).sum())
    with pytest.raises(SyncError, match="inside other saved-tensor hooks"):
        checkpoint(ddp, torch.ones(5, 24, requires_grad=True), use_reentrant=False)
    assert float(ddp(torch.ones(5, 24)).sum()) == loss_before


@ranks(1)
def test_an_interrupt_in_a_forward_leaves_nothing_behind(rank: int, world: int) -> None:
    """torch tells no hook of a KeyboardInterrupt that a module's forward has ended."""
    parallel_state.initialize_model_parallel()
    model = Model()
    ddp, other = sharded(model), sharded(Gated())
    expected = float(loss_of(ddp, rank, 0))

    def interrupt(module: nn.Module, inputs: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].up.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss_of(ddp, rank, 0)
    handle.remove()
    other(torch.ones(5, 24)).sum().backward()  # refused inside the hooks of another model
    loss = loss_of(ddp, rank, 0)
    loss.backward()
    finalize_model_grads([ddp])
    assert float(loss) == expected
    with ddp.gathered():
        assert model.words.weight.isfinite().all()


@ranks(2)
def test_a_parameter_that_another_wrapper_has_sharded_is_refused_at_the_wrap(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = Gated()
    ddp = sharded(model)
    with pytest.raises(ValueError, match="'weights.0' is sharded by another wrapper"):
        wrap(model)
    del ddp
    gc.collect()
    with pytest.raises(ValueError, match="'weights.0' is sharded by another wrapper"):
        wrap(model)


@ranks(2)
def test_a_bucket_of_nothing_is_gathered(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Linear(24, 24)
    model.nothing = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
    ddp = sharded(model)
    with ddp.gathered():
        assert model.nothing.shape == (0, 3)
    ddp(torch.ones(2, 24)).sum().backward()
    finalize_model_grads([ddp])


@ranks(2)
def test_a_bucket_of_nothing_lies_next_to_others_in_mapped_memory(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Linear(24, 24)
    model.nothing, model.more = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(0), requires_grad=False)
    ddp = sharded(model, bucket_size=1)
    ddp(torch.ones(2, 24)).sum().backward()
    finalize_model_grads([ddp])
    with ddp.gathered():
        assert model.nothing.shape == (0, 3)


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_ranks_that_write_different_values_inside_gathered_are_refused(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model(), share_host_memory=share)
    refusal = "'blocks.1.up.weight' has other values on ranks .* on all ranks, or broadcast"
    with pytest.raises(SyncError, match=refusal), ddp.gathered(), torch.no_grad():
        ddp.module.places.zero_()
        if rank == 0:
            ddp.module.blocks[1].up.weight.fill_(0.5)
    assert all(torch.equal(ddp.state_dict()[name], value) for name, value in Model().state_dict().items())
    with ddp.gathered(), torch.no_grad():
        if rank == 0:
            ddp.module.blocks[1].up.weight.fill_(0.5)
        torch.distributed.broadcast(ddp.module.blocks[1].up.weight, 0)
    assert ddp.state_dict()["blocks.1.up.weight"].eq(0.5).all()


@ranks(4)
def test_writes_of_some_ranks_alone_leave_gathered_on_all(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False))
    model[0].weight.tensor_model_parallel = True
    model[0].weight.partition_dim, model[0].weight.partition_stride = 0, 1
    model[1].weight.allreduce = False
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    ddp = sharded(model)
    for _ in range(2):
        with ddp.gathered(), torch.no_grad():
            if parallel_state.get_tensor_model_parallel_rank() == 0:
                model[0].weight.add_(1)
    expected = 2.5 if parallel_state.get_tensor_model_parallel_rank() == 0 else 0.5
    assert ddp.state_dict()["0.weight"].eq(expected).all()


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_an_error_inside_gathered_on_one_rank_is_reported_to_all(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    alone = Tower()
    ddp = sharded(copy.deepcopy(alone), share_host_memory=share)
    said = "rank 1 failed: KeyError: 'no such file'" if rank == 0 else "no such file"
    with pytest.raises(SyncError if rank == 0 else KeyError, match=said), ddp.gathered(), torch.no_grad():
        ddp.module.layers[0].weight.zero_()
        if rank == 1:
            raise KeyError("no such file")
    assert torch.equal(ddp(torch.ones(2, 16)), alone(torch.ones(2, 16))), "nothing was taken over"

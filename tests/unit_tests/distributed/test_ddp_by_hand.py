"""What users do to gradients, weights and wrappers themselves."""

import gc

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import SyncError, finalize_model_grads
from core.model_parallel_config import ModelParallelConfig
from core.tensor_parallel.deferred_weights import deferred_weight_gradients
from core.tensor_parallel.layers import ColumnParallelLinear
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

SETTINGS = [(strategy, overlap) for strategy in ("no_shard", "optim", "optim_grads") for overlap in (False, True)]


@ranks(2)
@pytest.mark.parametrize("fresh", [False, True])
def test_gradients_can_be_scaled_before_and_after_their_reduction(rank: int, world: int, fresh: bool) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        expected = {name: grad * 0.75 for name, grad in mean_over_ranks(model, world).items()}
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        for _ in range(2):
            ddp.zero_grad_buffer()
            if fresh:
                for param in model.parameters():
                    param.grad = None
            with ddp.no_sync():
                loss_of(ddp, rank, 0).backward()
            ddp.scale_gradients(0.5)
            finalize_model_grads([ddp])
            ddp.scale_gradients(torch.tensor(1.5))
            assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_a_bucket_in_flight_cannot_be_scaled(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), overlap_grad_reduce=True)
    loss_of(ddp, rank, 0).backward()
    with pytest.raises(SyncError, match="in flight and cannot be scaled"):
        ddp.scale_gradients(0.5)
    finalize_model_grads([ddp])


@ranks(2)
def test_a_gradient_that_the_user_adds_after_backward_is_reduced(rank: int, world: int) -> None:
    """No hook tells of it; rank 0 alone has one."""
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        expected = mean_over_ranks(model, world)
        expected["second.weight"] = expected["second.weight"] + 0.5
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, 0).backward()
        if rank == 0:
            weight = model.second.weight
            weight.grad = torch.ones_like(weight) if weight.grad is None else weight.grad + 1.0
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_weight_gradients_that_were_put_off_past_the_launch_are_reduced(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    config = ModelParallelConfig()
    layer = ColumnParallelLinear(4, 4, config=config, init_method=nn.init.ones_, bias=False)
    ddp = wrap(layer, config, overlap_grad_reduce=True)
    with deferred_weight_gradients() as work:
        ddp(torch.full((2, 4), float(rank + 1), requires_grad=True))[0].sum().backward()
    for put_off in work:
        put_off()
    finalize_model_grads([ddp])
    assert layer.weight.grad.unique().tolist() == [3.0]


@ranks(2)
def test_a_gradient_with_a_graph_of_its_own_is_reduced(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        expected = mean_over_ranks(model, world)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        loss_of(ddp, rank, 0).backward(create_graph=True)
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), expected)
        assert not ddp.grad_buffers[0].grad_data.requires_grad


@ranks(2)
def test_a_model_can_be_wrapped_again_with_gradients_of_another_dtype(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net(torch.bfloat16)
    for in_fp32 in (True, False, True):
        ddp = wrap(model, grad_reduce_in_fp32=in_fp32)
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        assert model.first.weight.grad.dtype == (torch.float32 if in_fp32 else torch.bfloat16)
        del ddp
        gc.collect()


@ranks(2)
def test_weights_loaded_into_the_inner_module_are_not_overwritten_by_a_gather(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Linear(512, 512)
    ddp = wrap(model, use_distributed_optimizer=True, overlap_param_gather=True)
    for number in range(5):
        wanted = {name: torch.full_like(value, float(number)) for name, value in model.state_dict().items()}
        ddp.start_param_sync()
        model.load_state_dict(wanted)
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


@ranks(2)
def test_one_of_two_optimizers_drops_its_gradients(rank: int, world: int) -> None:
    """The next step has gradients on rank 0 only, and only for what was dropped."""
    parallel_state.initialize_model_parallel()
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
            return sum((self.parts[name](x).sum() for name in names), torch.zeros(()))

    ddp = wrap(Sum())
    optimizer = torch.optim.SGD(model["a"].parameters(), lr=0.1)
    ddp(torch.ones(1, 4), "ab").backward()
    finalize_model_grads([ddp])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    value = ddp(torch.ones(1, 4), "a" if rank == 0 else "")
    if value.requires_grad:
        value.backward()
    finalize_model_grads([ddp])
    assert model["a"].weight.grad.unique().tolist() == [0.5]
    assert model["b"].weight.grad.unique().tolist() == [1.0]


@ranks(2)
def test_complex_parameters_are_refused_by_name(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="'weight' is torch.complex64"):
        wrap(model)


@ranks(2)
def test_gradients_that_were_kept_are_not_reduced_twice(rank: int, world: int) -> None:
    """With an expert in the model a second reduction divides again; one of two optimizers dropped its gradients."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight.allreduce = False
    ddp = wrap(nn.Sequential(model["a"], model["b"]), initial_weights="ignore")
    ddp(torch.ones(1, 4)).sum().backward()
    finalize_model_grads([ddp])
    model["a"].zero_grad(set_to_none=True)
    model["a"](torch.ones(1, 4)).sum().backward()
    with pytest.raises(SyncError, match="while that of '1.weight', already reduced, was still in `.grad`"):
        finalize_model_grads([ddp])


@ranks(2)
def test_a_second_finalize_after_a_forward_alone_is_refused_on_all_ranks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), use_distributed_optimizer=True)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    loss_of(ddp, rank, 1)  # an evaluation without no_grad
    with pytest.raises(SyncError, match="no rank of data group 'dp_cp' had a gradient"):
        finalize_model_grads([ddp])


@ranks(2)
def test_a_plain_optimizer_over_sharded_gradients_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), use_distributed_optimizer=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp], force_all_reduce=True)
    optimizer.step()
    ddp.zero_grad_buffer()
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    with pytest.raises(SyncError, match="holds parameters whose gradients are sharded"):
        optimizer.step()


@ranks(2)
def test_a_kernel_that_writes_main_grad_is_believed_when_it_says_so(rank: int, world: int) -> None:
    """Transformer Engine's and apex's way: `.grad` stays None, and a flag on the parameter tells."""
    parallel_state.initialize_model_parallel()
    model = make_net()
    expected = mean_over_ranks(model, world)
    expected["second.weight"] = torch.full_like(expected["second.weight"], 1.5)
    ddp = wrap(model)
    for written in (True, False):
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, 0).backward()
        weight = model.second.weight
        weight.grad = None
        if written:
            weight.main_grad.fill_(rank + 1.0)
            weight.grad_added_to_main_grad = True
        else:
            expected["second.weight"] = torch.zeros_like(expected["second.weight"])
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), expected)

"""Models that torch's own tools have wrapped, split, compiled or scripted: right gradients, or a refusal by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from core import parallel_state
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.distributed.test_ddp_startup import counted_collectives
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

TorchDDP = nn.parallel.DistributedDataParallel
STRATEGIES = ("no_shard", "optim", "optim_grads")


class Outer(nn.Module):
    """A model with the wrapped one as a part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))


@ranks(2)
@pytest.mark.parametrize("place", ["wrapper", "module", "part"])
def test_torchs_wrapper_around_ours_is_refused_in_the_first_forward(rank: int, world: int, place: str) -> None:
    """Both would reduce: torch's in the middle of the bucket that ours is still adding to."""
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True)
        around: dict[str, Callable[[], nn.Module]] = {
            "wrapper": lambda ddp=ddp: ddp,
            "module": lambda ddp=ddp: ddp.module,
            "part": lambda ddp=ddp: Outer(ddp),
        }
        outside = TorchDDP(around[place]())
        with pytest.raises(RuntimeError, match="inside torch's DistributedDataParallel.*Leave one of the two out"):
            loss_of(outside, rank, 0)
        # Without the other one the model trains on.
        expected = mean_over_ranks(ddp.module, world)
        del outside
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), expected)


def torch_ddp_inside() -> nn.Module:
    return Outer(TorchDDP(make_net()))


def fsdp_inside() -> nn.Module:
    return Outer(FullyShardedDataParallel(make_net(), device_id=torch.device("cpu"), use_orig_params=True))


def fully_shard_inside() -> nn.Module:
    model = Outer(make_net())
    fully_shard(model.inner.second)
    return model


def dtensors_inside() -> nn.Module:
    return parallelize_module(
        make_net(), init_device_mesh("cpu", (dist.get_world_size(),)), {"first": ColwiseParallel()}
    )


def lazy_inside() -> nn.Module:
    return nn.Sequential(make_net(), nn.LazyLinear(3))


def sparse_inside() -> nn.Module:
    model = make_net()
    model.table = nn.Parameter(torch.eye(3, dtype=torch.float64).to_sparse())
    return model


REFUSED: dict[Callable[[], nn.Module], str] = {
    torch_ddp_inside: "module 'inner' is torch's DistributedDataParallel",
    fsdp_inside: "module 'inner' is torch's FullyShardedDataParallel",
    fully_shard_inside: "parameter 'inner.second.weight' is a DTensor.*Leave this wrapper out",
    dtensors_inside: "parameter 'first.weight' is a DTensor.*core.tensor_parallel",
    lazy_inside: "parameter '1.weight' is lazy.*run one forward",
    sparse_inside: "parameter 'table' is torch.sparse_coo.*to_dense",
}


@ranks(2)
@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_cannot_be_wrapped_is_refused_by_name_before_gradients_or_weights_travel(
    rank: int, world: int, make: Callable[[], nn.Module]
) -> None:
    parallel_state.initialize_model_parallel()
    model = make()
    for strategy in STRATEGIES:
        with counted_collectives(pytest.MonkeyPatch()) as calls, pytest.raises(ValueError, match=REFUSED[make]):
            wrap(model, data_parallel_sharding_strategy=strategy)
        # In each data group the ranks tell each other that they refuse, and nothing else.
        assert calls == ["all_reduce", "all_reduce", "all_gather"] * 2


@ranks(2)
def test_a_scripted_model_is_refused_with_the_way_to_wrap_it(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        model = make_net()
        expected = mean_over_ranks(model, world)
        scripted = torch.jit.trace(model, torch.zeros(4, 5, dtype=torch.float64))
        with pytest.raises(ValueError, match="takes no Python hooks.*Sequential"):
            wrap(scripted, data_parallel_sharding_strategy=strategy)
        ddp = wrap(nn.Sequential(scripted), data_parallel_sharding_strategy=strategy)
        for _ in range(2):
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, 0).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), {f"0.{name}": grad for name, grad in expected.items()})


class Framed(nn.Module):
    """As Megatron's Float16Module and others that keep what they wrap as `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda ddp: torch.compile(ddp, backend="eager"),
    "framed": Framed,
    "compiled frame": lambda ddp: torch.compile(Framed(ddp), backend="eager"),
}


@ranks(2)
@pytest.mark.parametrize("around", AROUND)
def test_a_compiled_or_framed_wrapper_trains_as_the_bare_one(rank: int, world: int, around: str) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        model = make_net(torch.float32)
        plain = copy.deepcopy(model)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy)
        outside = AROUND[around](ddp)
        assert not isinstance(outside, DistributedDataParallel)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.0), [outside])
        loss_of(outside, rank, 0).backward()
        finalize_model_grads([outside])
        expected = mean_over_ranks(plain, world)
        assert_same(whole_grads(ddp), expected, rtol=1e-5)
        assert optimizer.step()[0]
        for name, param in plain.named_parameters():
            decayed = param.detach() * (1 - 0.1 * 0.01 * (param.dim() > 1))
            torch.testing.assert_close(ddp.module.get_parameter(name), decayed - 0.1 * expected[name].float())

"""Wrapping stays cheap: what it does for each parameter, and how often ranks talk, is counted; values are as ever."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from core import parallel_state
from core.distributed import ContractError, LayoutMismatch, finalize_model_grads
from core.distributed.buffer.grad_buffer import move_to
from core.distributed.contract.gradient_contract import (
    DEFAULT_RULES,
    GradSyncRule,
    declare_gradient,
    read_contracts,
)
from core.distributed.layout.param_layout import BufferKey, ParamSpec, plan_buffer
from core.distributed.wire import packs as weight_copies
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap


class Many(nn.Module):
    """`count` parameters of some shapes, equal on every rank."""

    SHAPES = ((3,), (2, 4), (), (1,), (5, 1, 2))

    def __init__(self, count: int) -> None:
        super().__init__()
        shapes = [self.SHAPES[i % len(self.SHAPES)] for i in range(count)]
        self.all = nn.ParameterList(nn.Parameter(torch.full(shape, float(i))) for i, shape in enumerate(shapes))


class CallCount(TorchDispatchMode):
    """Counts what torch's dispatcher is asked to do."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    seen: list[str] = []
    with monkeypatch.context() as patched:
        for name in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "barrier"):
            original = getattr(dist, name)

            def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
                seen.append(_name)
                return _original(*args, **kwargs)

            patched.setattr(dist, name, counted)
        yield seen


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_collectives_of_a_wrap_do_not_grow_with_the_parameters(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    for weights in ("check", "broadcast"):
        seen = {}
        for count in (10, 400):
            with counted_collectives(pytest.MonkeyPatch()) as calls:
                wrap(Many(count), data_parallel_sharding_strategy=strategy, initial_weights=weights)
            seen[count] = list(calls)
        assert seen[10] == seen[400]
        # the plan is compared once, the weights are compared or sent once
        assert seen[400][-1] == ("all_reduce" if weights == "check" else "broadcast") and seen[400].count("all_reduce")


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.in_suite()
def test_torch_calls_of_a_wrap_are_a_few_a_parameter(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    wrap(Many(1), data_parallel_sharding_strategy=strategy)  # from the second model on ranks ask what became of others
    calls = {}
    for count in (100, 200, 300):
        with CallCount() as counter:
            wrap(Many(count), data_parallel_sharding_strategy=strategy)
        calls[count] = counter.calls
    assert calls[300] - calls[200] == calls[200] - calls[100]  # linear
    # A slice and a view of the gradient; where the parameter moves the same of it, and a copy; a reshape for its sum.
    assert 0 < (calls[200] - calls[100]) / 100 <= 7


def python_calls(action: Callable[[], Any]) -> int:
    """Python functions entered, and generators resumed, while `action` runs."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


@ranks(1)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_python_calls_of_a_wrap_and_of_an_optimizer_are_a_few_a_parameter(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    wraps, optimizers = [], []

    def make(model: nn.Module) -> None:
        made.append(wrap(model, data_parallel_sharding_strategy=strategy))

    for count in (100, 200, 300, 400):
        made: list[Any] = []
        wraps.append(python_calls(partial(make, Many(count))))
        config = OptimizerConfig(optimizer="adam", lr=1e-3)
        optimizers.append(python_calls(partial(get_megatron_optimizer, config, made)))
    for calls, most in ((wraps[1:], 32), (optimizers[1:], 70)):
        each = (calls[2] - calls[0]) / 200
        assert 0 < each <= most
        assert calls[2] - calls[1] == pytest.approx(calls[1] - calls[0], rel=0.05)  # linear


@pytest.mark.parametrize("sharded", [False, True])
def test_views_are_slices_reshaped(sharded: bool) -> None:
    key = BufferKey("float32", "float32", "dp_cp")
    shapes = [(3,), (2, 4), (), (0, 3), (5, 1, 2), (1,)] * 3
    specs = [ParamSpec(f"p{i}", shape, key) for i, shape in enumerate(shapes)]
    layout = plan_buffer(specs, bucket_size=40, shards=2, sharded=sharded)
    assert len(layout.buckets) > 1
    whole = torch.arange(float(layout.numel))
    for bucket in layout.buckets:
        flat = whole.data[bucket.start : bucket.end]
        for slot, view in zip(bucket.slots, bucket.views_of(flat), strict=True):
            expected = whole[slot.start : slot.end].view(slot.shape)
            assert view.shape == expected.shape and view.stride() == expected.stride()
            assert torch.equal(view, expected)
            assert view.data_ptr() == expected.data_ptr() or view.numel() == 0
        borrowed = flat.clone()  # memory of its own, which does not begin where the buffer does
        for view, lent in zip(bucket.views_of(flat), bucket.views_of(borrowed), strict=True):
            assert torch.equal(view, lent)


def test_parameters_move_with_their_values() -> None:
    sizes = [3, 2, 4, 1, 9, 2]
    params = [nn.Parameter(torch.arange(float(size)) + 10 * i) for i, size in enumerate(sizes)]
    params[2] = nn.Parameter(params[2].detach().view(2, 2).t())
    expected = [param.detach().clone() for param in params]
    whole = torch.zeros(sum(sizes))
    views = [part.view(param.shape) for part, param in zip(whole.split(sizes), params, strict=True)]
    move_to(views, params)
    for param, view, value in zip(params, views, expected, strict=True):
        assert torch.equal(param, value) and param.data_ptr() == view.data_ptr() and param.requires_grad


class Groups:
    """Four tensor-parallel ranks, of which this is the second, two pipeline stages, six data ranks."""

    sizes = {"tp": (4, 1), "expt_tp": (4, 1), "dp_cp": (6, 0), "pp": (2, 0), "embd": (2, 0), "expt_dp": (3, 0)}

    def size(self, name: str) -> int:
        return self.sizes.get(name, (1, 0))[0]

    def rank(self, name: str) -> int:
        return self.sizes.get(name, (1, 0))[1]

    def require(self, name: str) -> str:
        return name


def test_contracts_worked_out_once_are_those_read_one_by_one() -> None:
    tags: list[dict[str, Any]] = [
        {},
        {"sequence_parallel": True},
        {"sequence_parallel": False},
        {"tensor_model_parallel": True},
        {"average_gradients_across_tp_domain": True},
        {"allreduce": False},
        {"allreduce": False, "tensor_model_parallel": True},
        {"shared_embedding": True},
        {"shared": True},
        {"pipeline_parallel": True},
        {"a_tag_of_somebody_else": [1]},
    ]
    module = Many(3 * len(tags) + 3)
    params = list(module.all)
    for i, param in enumerate(params[:-3]):
        for name, value in tags[i % len(tags)].items():
            setattr(param, name, value)
    declare_gradient(params[-1], partial_over=("tp",))
    declare_gradient(params[-2], averaged_over=("tp",))
    named = [(f"layers.{i}.weight", param) for i, param in enumerate(params)]
    named.append(("layers.0.q_layernorm.weight", params[-3]))

    class Config:
        qk_layernorm = True

    def odd(contract: Any) -> bool:
        return contract.name.endswith("1.weight")

    rules = (GradSyncRule("odd ones", "tp", "sum", odd),)
    for chosen in (DEFAULT_RULES, (*DEFAULT_RULES, *rules)):
        found = read_contracts(named, module.modules(), Groups(), Config(), chosen)
        for name, param in named:
            assert found[name] == read_contracts([(name, param)], module.modules(), Groups(), Config(), chosen)[name]
        assert len({contract[1:] for contract in found.values()}) > 6
    served = [name for name, contract in found.items() if any("odd ones" in rule for rule in contract.rules)]
    assert served == [name for name, _ in named if name.endswith("1.weight")]


def test_the_first_parameter_of_a_wrong_kind_is_named() -> None:
    module = Many(6)
    for index in (2, 4):
        module.all[index].tensor_model_parallel = True
        module.all[index].average_gradients_across_tp_domain = True
    with pytest.raises(ContractError, match=r"'all\.2'"):
        read_contracts(module.named_parameters(), module.modules(), Groups(), None)


class Mixed(nn.Module):
    """Small and large parameters of two dtypes, one frozen, one that is not contiguous."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.a = make(3)
        self.brief = make(4, 2, dtype=torch.bfloat16)
        self.large = make(40, 5)
        self.turned = nn.Parameter(make(4, 3).detach().t())
        self.frozen = make(6).requires_grad_(False)
        self.twin = nn.Parameter(self.a.detach() + 1)
        self.last = make(2, dtype=torch.bfloat16)


@ranks(2)
def test_the_first_differing_parameter_is_named_wherever_it_travels(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    patch = pytest.MonkeyPatch()
    patch.setattr(weight_copies, "SMALL_NUMEL", 50)
    try:
        for pack_numel in (4, 2**20):
            patch.setattr(weight_copies, "PACK_NUMEL", pack_numel)
            for name, alone, strategy in itertools.product(
                ("a", "brief", "large", "turned", "frozen", "last"), (True, False), ("no_shard", "optim")
            ):
                model = Mixed(0)
                if rank == 1:
                    with torch.no_grad():
                        getattr(model, name)[..., -1].add_(1)
                        if not alone:
                            model.last[0].add_(3)  # a later one: not the first
                with pytest.raises(LayoutMismatch, match=f"'{name}' has other values on ranks .1."):
                    wrap(model, data_parallel_sharding_strategy=strategy)
            model = Mixed(0)
            if rank == 1:  # the same values in all, but in other parameters
                model.a, model.twin = model.twin, model.a
            with pytest.raises(LayoutMismatch, match="'a' has other values"):
                wrap(model)
            wrap(Mixed(0))
    finally:
        patch.undo()


@ranks(2)
def test_every_weight_is_broadcast(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    expected = {name: param.detach().clone() for name, param in Mixed(0).named_parameters()}
    patch = pytest.MonkeyPatch()
    patch.setattr(weight_copies, "SMALL_NUMEL", 50)
    try:
        for pack_numel in (4, 2**20):
            patch.setattr(weight_copies, "PACK_NUMEL", pack_numel)
            for strategy in ("no_shard", "optim"):
                ddp = wrap(Mixed(rank), initial_weights="broadcast", data_parallel_sharding_strategy=strategy)
                for name, param in ddp.module.named_parameters():
                    assert torch.equal(param, expected[name]), name
    finally:
        patch.undo()


@ranks(1)
def test_the_garbage_collector_is_left_as_it_was(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        try:
            wrap(make_net())
            assert gc.isenabled() == was_on
            refused = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
            with pytest.raises(ValueError, match="hold real numbers"):
                wrap(refused)
            assert gc.isenabled() == was_on
        finally:
            gc.enable()


@ranks(1)
def test_what_a_user_dropped_before_a_wrap_is_collected_without_being_asked_for(rank: int, world: int) -> None:
    """Garbage in a cycle is found by a young collection: a wrap may not move it to where no one looks."""
    parallel_state.initialize_model_parallel()
    dropped = nn.Linear(2, 2)
    dropped.itself = [dropped]
    seen = weakref.ref(dropped)
    del dropped
    ddp = wrap(Many(30))
    get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [ddp])
    gc.collect(1)
    assert seen() is None


@ranks(2)
def test_hooks_of_the_user_stay_next_to_ours(rank: int, world: int) -> None:
    """Registered before the wrap and after it, and on a model that is wrapped a second time; one may be removed."""
    parallel_state.initialize_model_parallel()
    model = make_net()
    heard: list[str] = []
    early = model.norm.weight.register_post_accumulate_grad_hook(lambda _: heard.append("before"))
    for _ in range(2):
        ddp = wrap(model, overlap_grad_reduce=True, bucket_size=1)
        model.first.bias.register_post_accumulate_grad_hook(lambda _: heard.append("after"))
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, 0).backward()
        assert ddp.reducer.next == len(ddp.reducer.buckets)  # so each of ours has been called
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), mean_over_ranks(make_net(), world))
        del ddp
    assert sorted(heard) == ["after", "after", "after", "before", "before"]
    early.remove()
    heard.clear()
    ddp = wrap(model)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    assert sorted(heard) == ["after", "after"]
    assert_same(whole_grads(ddp), mean_over_ranks(make_net(), world))


def test_a_parameter_that_moved_is_one_that_autograd_knows() -> None:
    """The move itself is none of autograd's business; every change after it is."""
    key = BufferKey("float32", "float32", "dp_cp")
    layout = plan_buffer([ParamSpec("w", (2, 3), key)], bucket_size=None, shards=1, sharded=True)
    (bucket,) = layout.buckets
    flat = torch.zeros(layout.numel)
    param = nn.Parameter(torch.arange(6.0).view(2, 3))
    before = (2 * param).square().sum()  # a graph that is older than the move, and stays whole
    move_to(bucket.views_of(flat), [param])
    assert flat[:6].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and param.data_ptr() == flat.data_ptr()
    before.backward()
    assert param.grad is not None and param.grad.tolist() == [[0.0, 8.0, 16.0], [24.0, 32.0, 40.0]]
    assert not param.is_inference() and not param.detach().view(-1).is_inference()
    version = param._version
    with torch.no_grad():
        param.add_(1)
    assert param._version == version + 1
    product = param.prod(0).sum()  # saves the parameter
    with torch.no_grad():
        param.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()

"""Gradient handlers on loose gradients. Rank r's gradient is 10**r, so a sum's digits say which ranks are in it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import LayoutMismatch
from core.gradient_handler import (
    GRADIENT_HANDLER,
    BaseGradientHandler,
    DataParallelGradientHandler,
    GradientHandlerError,
    MoeGradientHandler,
    Registry,
    SequenceParallelGradientHandler,
    build_gradient_handler,
)
from core.gradient_handler.loose_gradients import gradient_of
from tests.unit_tests.rank_codes import ODD, Bag, digits, ramp
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def codes_of(bag: Bag) -> dict[str, float | None]:
    """The code that every element of a gradient carries; nan where elements disagree, None without a gradient."""
    found: dict[str, float | None] = {}
    for name, param in bag.named_parameters():
        if param.grad is None:
            found[name] = None
            continue
        codes = param.grad.double() / ramp(param).double()
        alike = torch.allclose(codes, codes.view(-1)[0], rtol=1e-12, atol=0)
        found[name] = float(codes.view(-1)[0]) if alike else float("nan")
    return found


def coded(rank: int, **shapes: Any) -> Bag:
    """A bag whose gradients are 10**rank already."""
    bag = Bag(**shapes)
    bag(10.0**rank).backward()
    return bag


@contextmanager
def counted_calls() -> Iterator[list[tuple[torch.dtype, int]]]:
    """(dtype, elements) of every gradient all-reduce that torch is asked for meanwhile."""
    calls: list[tuple[torch.dtype, int]] = []
    all_reduce = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype != torch.int64:
            calls.append((tensor.dtype, tensor.numel()))
        return all_reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting)
        yield calls


# -- data parallel --------------------------------------------------------------------------------------------------


@ranks(1, 3, nightly=(2, 4))
@pytest.mark.parametrize("handler", [DataParallelGradientHandler, SequenceParallelGradientHandler, MoeGradientHandler])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_become_the_mean_over_ranks(rank: int, world: int, handler: Any, deterministic: bool) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    expected = mean_over_ranks(model, world)
    ours = handler(model, None, deterministic=deterministic)
    for _ in range(2):
        model.zero_grad()
        loss_of(model, rank, 0).backward()
        ours.handle_gradient()
        assert_same(grads_of(model), expected)


@ranks(4)
def test_training_with_a_large_step_equals_one_process_on_the_whole_batch(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model, reference = make_net(), make_net()
    start = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    handler = DataParallelGradientHandler(model, optimizer)
    for step in range(4):
        expected = mean_over_ranks(reference, world, (step,))
        with torch.no_grad():
            for name, param in reference.named_parameters():
                param -= 0.02 * expected[name]
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        handler.handle_gradient()
        optimizer.step()
    moved = max(float((a - b).abs().max()) for a, b in zip(reference.parameters(), start.parameters(), strict=True))
    assert moved > 0.1
    for ours, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-9)


@ranks(4)
def test_context_parallel_ranks_are_part_of_the_mean(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    for handler in (DataParallelGradientHandler, SequenceParallelGradientHandler):
        bag = coded(rank, w=ODD)
        handler(bag, None).handle_gradient()
        assert codes_of(bag) == {"w": 1111 / 4}


@ranks(4)
def test_tensor_parallel_ranks_are_not_mixed(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    bag = coded(rank, w=ODD)
    DataParallelGradientHandler(bag, None).handle_gradient()
    assert codes_of(bag) == {"w": digits(rank % 2, rank % 2 + 2) / 2}


@ranks(3)
def test_a_group_can_be_passed_in(rank: int, world: int) -> None:
    pair = dist.new_group([0, 2])
    bag = coded(rank, w=ODD)
    if rank != 1:
        DataParallelGradientHandler(bag, None, group=pair).handle_gradient()
    assert codes_of(bag) == {"w": digits(0, 2) / 2 if rank != 1 else 10.0}


def test_without_process_groups_there_is_nothing_to_do() -> None:
    bag = coded(0, w=ODD)
    DataParallelGradientHandler(bag, None).handle_gradient()
    assert codes_of(bag) == {"w": 1.0}


@ranks(2)
def test_without_parallel_state_and_without_a_group_the_error_says_what_to_call(rank: int, world: int) -> None:
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        DataParallelGradientHandler(coded(rank, w=ODD), None).handle_gradient()


# -- coalescing -----------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Six parameters of three dtypes, in turn."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float64)
        self.ps = nn.ParameterList([nn.Parameter(torch.zeros(3, 5, dtype=dtypes[i % 3])) for i in range(6)])

    def fill(self, rank: int) -> None:
        for i, param in enumerate(self.ps):
            param.grad = torch.full_like(param, 2.0**i * (rank + 1))


@ranks(2)
def test_k_dtypes_are_k_collectives(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = Mixed()
    model.fill(rank)
    handler = DataParallelGradientHandler(model, None)
    with counted_calls() as calls:
        handler.handle_gradient()
    assert calls == [(torch.float32, 30), (torch.bfloat16, 30), (torch.float64, 30)]
    assert handler.traffic.collectives == 3
    for i, param in enumerate(model.ps):
        assert param.grad.unique().tolist() == [2.0**i * 1.5] and param.grad.dtype == param.dtype


@ranks(3)
def test_fp16_gradients_are_divided_before_they_are_added(rank: int, world: int) -> None:
    """Three times 40 000 is more than fp16 can hold."""
    parallel_state.initialize_model_parallel()
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    model.w.grad = torch.full((4,), 40000.0 - 6000 * rank, dtype=torch.float16)
    DataParallelGradientHandler(model, None).handle_gradient()
    torch.testing.assert_close(model.w.grad.float(), torch.full((4,), 34000.0), rtol=2e-3, atol=0)


@ranks(2)
def test_a_cap_cuts_collectives(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    bag = coded(rank, a=(10,), b=(10,), c=(10,), d=(50,), e=(5,), f=(5,))
    kib = 160 / 2**20  # 20 elements of fp64
    with counted_calls() as calls:
        DataParallelGradientHandler(bag, None, bucket_cap_mb=kib).handle_gradient()
    assert [numel for _, numel in calls] == [20, 10, 50, 10]
    assert set(codes_of(bag).values()) == {11 / 2}


@pytest.mark.parametrize("cap", [0, -1.0, float("nan")])
def test_a_cap_that_holds_nothing_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        DataParallelGradientHandler(Bag(w=ODD), None, bucket_cap_mb=cap)


@ranks(2)
def test_a_large_gradient_travels_where_it_lies(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    bag = coded(rank, small=(3,), large=(2**20,), other=(4,))
    with counted_calls() as calls:
        DataParallelGradientHandler(bag, None).handle_gradient()
    assert [numel for _, numel in calls] == [3, 2**20, 4]
    assert set(codes_of(bag).values()) == {11 / 2}


@ranks(2)
def test_gradients_keep_their_memory_and_their_strides(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4, 6))
    model.t = nn.Parameter(torch.zeros(4, 6))
    model.w.grad = torch.full((4, 6), 10.0**rank)
    strided = (torch.arange(24.0).view(6, 4) * 10.0**rank).t()
    model.t.grad = strided
    assert not strided.is_contiguous()
    before = [(p.grad, p.grad.data_ptr(), p.grad.stride()) for p in (model.w, model.t)]
    DataParallelGradientHandler(model, None).handle_gradient()
    for param, (grad, pointer, stride) in zip((model.w, model.t), before, strict=True):
        assert param.grad is grad and grad.data_ptr() == pointer and grad.stride() == stride
    assert torch.equal(model.w.grad, torch.full((4, 6), 5.5))
    assert torch.equal(model.t.grad, torch.arange(24.0).view(6, 4).t() * 5.5)


# -- gradients that are not there -----------------------------------------------------------------------------------


@ranks(3)
def test_a_parameter_without_a_gradient_on_some_ranks_gets_the_mean_with_zeros_for_them(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    bag = coded(rank, w=ODD, sometimes=(5, 3), last=(2,))
    if rank != 1:
        bag.sometimes.grad = None
    DataParallelGradientHandler(bag, None).handle_gradient()
    assert codes_of(bag) == pytest.approx({"w": 37.0, "last": 37.0, "sometimes": 10 / 3})


@ranks(2)
def test_a_parameter_without_a_gradient_anywhere_stays_without(rank: int, world: int) -> None:
    """So that weight decay and momentum do not move it, as on one process."""
    parallel_state.initialize_model_parallel()
    bag = coded(rank, w=ODD, unused=(4,))
    bag.unused.grad = None
    with counted_calls() as calls:
        DataParallelGradientHandler(bag, None).handle_gradient()
    assert codes_of(bag) == {"w": 5.5, "unused": None}
    assert [numel for _, numel in calls] == [ODD[0] * ODD[1]]


@ranks(2)
def test_a_rank_without_any_gradient_takes_part(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    bag = coded(rank, w=ODD)
    if rank == 1:
        bag.w.grad = None
    DataParallelGradientHandler(bag, None).handle_gradient()
    assert codes_of(bag) == {"w": 0.5}


@ranks(2)
def test_no_gradient_at_all_is_no_collective(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    bag = Bag(w=ODD)
    with counted_calls() as calls:
        DataParallelGradientHandler(bag, None).handle_gradient()
    assert not calls and bag.w.grad is None


@ranks(2)
def test_a_frozen_parameter_is_left_alone_and_may_thaw(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    bag = Bag(w=ODD, frozen=(3,))
    bag.frozen.requires_grad_(False)
    bag(10.0**rank).backward()
    handler = DataParallelGradientHandler(bag, None)
    handler.handle_gradient()
    assert codes_of(bag) == {"w": 5.5, "frozen": None}
    bag.frozen.requires_grad_(True)
    bag.zero_grad()
    bag(10.0**rank).backward()
    handler.handle_gradient()
    assert codes_of(bag) == {"w": 5.5, "frozen": 5.5}


@ranks(2)
def test_a_parameter_frozen_on_one_rank_is_an_error_on_all(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    bag = Bag(w=ODD, v=(3,))
    bag.v.requires_grad_(rank == 0)
    bag(1.0).backward()
    with pytest.raises(GradientHandlerError, match="'v' is frozen on some ranks"):
        DataParallelGradientHandler(bag, None).handle_gradient()


@ranks(3)
def test_an_fp32_gradient_of_a_bf16_parameter_travels_as_fp32(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    if rank != 2:
        model.w.grad_dtype = torch.float32
        model.w.grad = torch.full((7,), 1.0 + (rank + 1) / 2**12)
    DataParallelGradientHandler(model, None).handle_gradient()
    assert model.w.grad.dtype == torch.float32
    torch.testing.assert_close(model.w.grad, torch.full((7,), (2 + 3 / 2**12) / 3), rtol=1e-7, atol=0)


@ranks(2)
def test_gradients_of_two_dtypes_are_an_error_that_names_both(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    model.w.grad_dtype = torch.float32 if rank else torch.bfloat16
    model.w.grad = torch.ones(7, dtype=model.w.grad_dtype)
    with pytest.raises(GradientHandlerError, match=r"'w' is torch.bfloat16 .* torch.float32"):
        DataParallelGradientHandler(model, None).handle_gradient()


@ranks(2)
def test_a_sparse_gradient_is_refused_by_name_on_all_ranks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Embedding(9, 4, sparse=rank == 1)
    model(torch.tensor([2, 2, 5])).sum().backward()
    with pytest.raises(GradientHandlerError, match="'weight' is torch.sparse_coo.*sparse=False"):
        DataParallelGradientHandler(model, None).handle_gradient()


@ranks(2)
def test_a_dtensor_is_refused_by_name(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    parallel_state.initialize_model_parallel()
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,))))
    model.w.sum().backward()
    with pytest.raises(GradientHandlerError, match="'w' is a DTensor"):
        DataParallelGradientHandler(model, None).handle_gradient()


@ranks(2)
@pytest.mark.parametrize("names", ["a", "abc"])
def test_gradients_that_travel_on_another_device_come_back(rank: int, world: int, names: str) -> None:
    """As CPU gradients in a group that moves device memory only; a copy stands for the other device."""
    parallel_state.initialize_model_parallel()
    bag = coded(rank, **{name: (3, 4) for name in names})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("core.gradient_handler.loose_gradients._on_wire", lambda flat, group: flat.clone())
        DataParallelGradientHandler(bag, None).handle_gradient()
    assert set(codes_of(bag).values()) == {5.5}


@ranks(2)
def test_models_that_differ_are_an_error_on_all_ranks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    with pytest.raises(LayoutMismatch, match="parameter 'w'"):
        DataParallelGradientHandler(coded(rank, w=(3, 4 + rank)), None).handle_gradient()


@ranks(2)
def test_a_parameter_that_is_added_later_is_noticed_on_all_ranks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    bag = coded(rank, w=ODD)
    handler = DataParallelGradientHandler(bag, None)
    handler.handle_gradient()
    if rank == 1:
        bag.late = nn.Parameter(torch.zeros(2))
    with pytest.raises(GradientHandlerError, match="make a new handler"):
        handler.handle_gradient()


def test_a_sharded_parameters_payload_is_read_only_where_it_holds_one() -> None:
    """ColossalAI read the payload of an empty saved gradient (its issue 1249)."""
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    payload = torch.full((2,), 7.0)
    for null, want in ((True, param.grad), (False, payload)):
        saved = types.SimpleNamespace(is_null=lambda null=null: null)
        param.colo_attr = types.SimpleNamespace(saved_grad=saved, grad_payload=payload)
        assert gradient_of(param) is want


# -- registry -------------------------------------------------------------------------------------------------------


def test_the_five_handlers_are_known_by_name() -> None:
    for name in ("DataParallel", "ZeRO", "PipelineSharedModule", "Moe", "SequenceParallel"):
        assert GRADIENT_HANDLER.has(f"{name}GradientHandler")
        assert issubclass(GRADIENT_HANDLER.get_module(f"{name}GradientHandler"), BaseGradientHandler)
    assert not GRADIENT_HANDLER.has("Other")


def test_a_handler_of_ones_own_is_registered_built_and_given_its_options() -> None:
    registry = Registry("test")

    @registry.register_module
    class Mine(BaseGradientHandler):
        def handle_gradient(self) -> None:
            pass

    assert registry.get_module("Mine") is Mine
    with pytest.raises(ValueError, match="already has a 'Mine'"):
        registry.register_module(Mine)
    with pytest.raises(ValueError, match="'Yours' is not in registry 'test'; known are Mine"):
        registry.get_module("Yours")
    with pytest.raises(TypeError, match="subclasses of BaseGradientHandler"):
        registry.register_module(int)


def test_a_handler_is_built_from_a_configuration_that_stays_as_it_was() -> None:
    model = nn.Linear(1, 1)
    config = {"type": "DataParallelGradientHandler", "bucket_cap_mb": 25}
    handler = build_gradient_handler(config, model, None, deterministic=True)
    assert isinstance(handler, DataParallelGradientHandler) and handler.bucket_cap_mb == 25
    assert handler.collectives.ordered and "type" in config
    assert type(build_gradient_handler("MoeGradientHandler", model, None)) is MoeGradientHandler
    with pytest.raises(ValueError, match="'Nope' is not in registry 'gradient_handler'"):
        build_gradient_handler({"type": "Nope"}, model, None)
    with pytest.raises(ValueError, match="'type'"):
        build_gradient_handler({"bucket_cap_mb": 1}, model, None)


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="handle_gradient"):
        BaseGradientHandler(nn.Linear(1, 1), None)

"""Accumulation on several ranks: reduced once a cycle in every way of reducing, equal to one process on all data."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.gradient_accumulation import AccumulationError, GradAccumOptimizer, accumulate_gradient
from core.gradient_handler import (
    DataParallelGradientHandler,
    PipelineSharedModuleGradientHandler,
    ZeROGradientHandler,
)
from core.model_parallel_config import ModelParallelConfig
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import make_net, wrap

LR = 0.3
ROW_WEIGHT = 0.3  # a row counts as so many tokens: a loss mask need not hold whole numbers
TorchDDP = nn.parallel.DistributedDataParallel
WAYS = (
    *("handler", "torch", "torch views", "ours", "ours overlapped", "sharded", "sharded overlapped"),
    *("sharded gradients overlapped last", "sharded gradients every"),
)


def batch(rank: int, number: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 3, generator=generator, dtype=torch.float64)


def mean_loss(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(data[0]) - data[1]).pow(2).mean()


def sum_loss(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A sum over rows, so that rows are the tokens."""
    return (model(data[0]) - data[1]).pow(2).sum() / 3


def large_batch(world: int, steps: int, size: int, rows: Any = None, max_norm: float | None = None) -> nn.Module:
    """One process, all ranks' microbatches of a cycle in one batch."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        numbers = range(step * size, (step + 1) * size)
        parts = [batch(r, n, 4 if rows is None else rows(r, n)) for r in range(world) for n in numbers]
        optimizer.zero_grad()
        mean_loss(model, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))).backward()
        if max_norm is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), max_norm) > 1.5 * max_norm
        optimizer.step()
    return model


def assert_equal_models(model: nn.Module, reference: nn.Module) -> None:
    for ours, want, before in zip(model.parameters(), reference.parameters(), make_net().parameters(), strict=True):
        torch.testing.assert_close(ours, want, rtol=0, atol=1e-10)
        assert (want - before).abs().max() > 1e-3, "the reference has hardly moved"


def made(way: str, net: nn.Module, config: Any = None, clip: float = 0.0) -> tuple[nn.Module, Any, Any]:
    """(model, optimizer, handlers) of one way of reducing."""
    model: nn.Module = net
    handlers = None
    if way.startswith("torch"):
        model = TorchDDP(net, gradient_as_bucket_view="views" in way)
    elif way.startswith("ours"):
        model = wrap(net, config, overlap_grad_reduce="overlapped" in way, bucket_size=60)
    elif way.startswith("sharded"):
        sharding: dict[str, Any] = {"data_parallel_sharding_strategy": "optim"}
        if "gradients" in way:
            sharding = {"data_parallel_sharding_strategy": "optim_grads", "reduce_microbatches": way.split()[-1]}
        model = wrap(net, config, overlap_grad_reduce="overlapped" in way, bucket_size=60, **sharding)
        options = OptimizerConfig(optimizer="sgd", lr=LR, sgd_momentum=0.0, weight_decay=0.0, clip_grad=clip)
        return model, get_megatron_optimizer(options, [model]), None
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    if way == "handler":
        handlers = [DataParallelGradientHandler(model, optimizer)]
    return model, optimizer, handlers


def train(
    model: nn.Module, optimizer: Any, handlers: Any, rank: int, numbers: range, *, rows: Any = None, clip: Any = None
) -> None:
    """The loop of a user, written once for all ways."""
    for number in numbers:
        optimizer.zero_grad()
        if rows is None:
            optimizer.backward(mean_loss(model, batch(rank, number)))
        else:
            count = rows(rank, number)
            optimizer.backward(sum_loss(model, batch(rank, number, count)) * ROW_WEIGHT, num_tokens=count * ROW_WEIGHT)
        for handler in handlers or ():
            handler.handle_gradient()
        if clip is not None:
            optimizer.clip_grad_norm(model, clip)
        optimizer.step()


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.in_suite()
def test_every_way_of_reducing_equals_one_process_on_the_large_batch(
    rank: int, world: int, way: str, size: int
) -> None:
    parallel_state.initialize_model_parallel()
    net = make_net()
    model, inner, handlers = made(way, net)
    optimizer, _, handlers, _ = accumulate_gradient(model, inner, [], size, handlers)
    train(model, optimizer, handlers, rank, range(3 * size))
    assert_equal_models(net, large_batch(world, 3, size))


@ranks(2)
@pytest.mark.parametrize("way", ["handler", "torch", "ours", "sharded"])
def test_the_whole_gradient_is_clipped_once(rank: int, world: int, way: str) -> None:
    parallel_state.initialize_model_parallel()
    net = make_net()
    model, inner, handlers = made(way, net, clip=0.1)
    optimizer, _, handlers, _ = accumulate_gradient(model, inner, [], 2, handlers)
    clip = None if way == "sharded" else 0.1  # the sharded optimizer clips in its step
    train(model, optimizer, handlers, rank, range(6), clip=clip)
    reference = large_batch(world, 3, 2, max_norm=0.1)
    for ours, want in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, want, rtol=0, atol=1e-6)  # the two add 1e-6 to the norm, in their own dtypes
    assert (reference.third.weight - make_net().third.weight).abs().max() > 1e-2


def uneven(rank: int, number: int) -> int:
    """Rows of a microbatch: 1 to 6, different on every rank and every time."""
    return 1 + (3 * rank + 2 * number + rank * number) % 6


@ranks(1, 3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.in_suite()
def test_microbatches_of_different_sizes_count_by_their_tokens(rank: int, world: int, way: str) -> None:
    parallel_state.initialize_model_parallel()
    net = make_net()
    per_token = ModelParallelConfig(calculate_per_token_loss=True)
    model, inner, handlers = made(way, net, per_token)
    optimizer, _, handlers, _ = accumulate_gradient(model, inner, [], 3, handlers)
    train(model, optimizer, handlers, rank, range(6), rows=uneven)
    assert_equal_models(net, large_batch(world, 2, 3, rows=uneven))


@ranks(2)
def test_torchs_wrapper_sends_gradients_in_the_last_microbatch_only(rank: int, world: int) -> None:
    """ColossalAI entered no_sync around backward alone; torch decides in forward, so every microbatch was sent."""
    net = make_net()
    model = TorchDDP(net)
    sent: list[int] = []

    def hook(_, bucket):  # torch wants its own types here, or none
        sent.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(world), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    optimizer = GradAccumOptimizer(torch.optim.SGD(net.parameters(), lr=LR), 4, model)
    counts = []
    for number in range(8):
        optimizer.zero_grad()
        optimizer.backward(mean_loss(model, batch(rank, number)))
        optimizer.step()
        counts.append(len(sent))
    assert counts[2] == 0 and counts[3] == counts[6] > 0 and counts[7] == 2 * counts[3]
    assert_equal_models(net, large_batch(world, 2, 4))


@ranks(2)
@pytest.mark.parametrize("way", ["ours overlapped", "sharded overlapped", "sharded gradients overlapped last"])
@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.in_suite()
def test_our_wrapper_sends_gradients_in_the_last_microbatch_only(rank: int, world: int, way: str, losses: int) -> None:
    parallel_state.initialize_model_parallel()
    net = make_net()
    model, inner, _ = made(way, net)
    optimizer, loader, _, _ = accumulate_gradient(model, inner, range(6), 3)
    launches = []
    for number in loader:
        optimizer.zero_grad()
        for _ in range(losses):
            optimizer.backward(mean_loss(model, batch(rank, number)) / losses)
        launches.append(model.reducer.launches)  # before the step, so these are launched by backward
        optimizer.step()
    buckets = len(model.reducer.buckets)
    assert buckets > 1 and launches == [0, 0, buckets, buckets, buckets, 2 * buckets]
    assert_equal_models(net, large_batch(world, 2, 3))


@ranks(2)
def test_a_handler_sends_once_a_cycle(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    net = make_net()
    model, inner, handlers = made("handler", net)
    plain = handlers[0]
    optimizer, _, handlers, _ = accumulate_gradient(model, inner, [], 4, handlers)
    train(model, optimizer, handlers, rank, range(8))
    assert plain.traffic.collectives == 2


@ranks(2)
@pytest.mark.parametrize("way", ["torch", "ours"])
def test_a_model_that_outlives_the_wrapper_reduces_again(rank: int, world: int, way: str) -> None:
    parallel_state.initialize_model_parallel()
    net = make_net()
    model, inner, _ = made(way, net)
    optimizer = GradAccumOptimizer(inner, 4, model)
    optimizer.backward(mean_loss(model, batch(rank, 0)))
    del optimizer
    gc.collect()
    inner.zero_grad()
    mean_loss(model, batch(rank, 0)).backward()
    if way == "ours":
        assert model.require_backward_grad_sync
        finalize_model_grads([model])
    inner.step()
    assert_equal_models(net, large_batch(world, 1, 1))


@ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.in_suite()
def test_every_way_resumes_in_the_middle_of_a_cycle(rank: int, world: int, way: str, stop: int) -> None:
    parallel_state.initialize_model_parallel()
    net = make_net()
    model, inner, handlers = made(way, net)
    optimizer, _, handlers, _ = accumulate_gradient(model, inner, [], 3, handlers)
    train(model, optimizer, handlers, rank, range(stop))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    kept = saved[1]["accumulation"]["gradients"], *saved[1]["accumulation"]["reduced"]
    assert any(kept) == (stop < 3)

    again = make_net()
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    model, inner, handlers = made(way, again)
    optimizer, _, handlers, _ = accumulate_gradient(model, inner, [], 3, handlers)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    if hasattr(inner, "reload_model_params"):
        inner.reload_model_params()
    train(model, optimizer, handlers, rank, range(stop, 6))
    assert_equal_models(again, large_batch(world, 2, 3))


@ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_zero_handler_and_the_wrapper_together_reduce_once(rank: int, world: int, sharded: bool) -> None:
    parallel_state.initialize_model_parallel()
    net = make_net()
    model = wrap(net, ModelParallelConfig(calculate_per_token_loss=True), use_distributed_optimizer=sharded)
    options = OptimizerConfig(optimizer="sgd", lr=LR, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
    inner = get_megatron_optimizer(options, [model])
    handlers = [ZeROGradientHandler(model, inner)]
    optimizer, _, handlers, _ = accumulate_gradient(model, inner, [], 3, handlers)
    train(model, optimizer, handlers, rank, range(6), rows=uneven)
    assert_equal_models(net, large_batch(world, 2, 3, rows=uneven))


@ranks(4)
def test_data_and_shared_module_handlers_accumulate_together(rank: int, world: int) -> None:
    """Ranks 0 and 2 are one stage, 1 and 3 another; the shared weight is averaged over data and added over stages."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    groups = parallel_state.get_process_groups()
    model = nn.Module()
    model.tied = nn.Parameter(torch.zeros(3))
    model.tied.pipeline_shared_module_pg = groups.pp
    inner = torch.optim.SGD([model.tied], lr=1.0)
    kinds = (DataParallelGradientHandler, PipelineSharedModuleGradientHandler)
    optimizer, _, handlers, _ = accumulate_gradient(model, inner, [], 2, [kind(model, inner) for kind in kinds])
    for _ in range(2):
        optimizer.backward(model.tied.sum() * 10.0**rank)
        for handler in handlers:
            handler.handle_gradient()
        optimizer.step()
    assert model.tied.tolist() == [-1111 / 2] * 3


@ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_cycle_that_is_discarded_leaves_nothing_behind(rank: int, world: int, way: str) -> None:
    parallel_state.initialize_model_parallel()
    net = make_net()
    model, inner, handlers = made(way, net)
    optimizer, _, handlers, _ = accumulate_gradient(model, inner, [], 2, handlers)
    for spoilt in (1, 2):
        for number in range(spoilt):
            optimizer.backward(100 * mean_loss(model, batch(rank, 50 + number)))
            if number == 0:
                optimizer.accumulation.stepped()
        optimizer.discard()
    train(model, optimizer, handlers, rank, range(4))
    assert_equal_models(net, large_batch(world, 2, 2))


@ranks(2)
def test_a_norm_of_shards_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model, inner, _ = made("sharded", make_net())
    plain = torch.optim.SGD(model.parameters(), lr=LR)
    for optimizer, says in ((inner, "clips inside step"), (plain, "a norm of parts")):
        accumulating = GradAccumOptimizer(optimizer, 1, model)
        accumulating.backward(mean_loss(model, batch(rank, 0)))
        with pytest.raises(ValueError, match=says):
            accumulating.clip_grad_norm(model, 1.0)
        model.zero_grad_buffer()


@ranks(2)
def test_our_gradients_on_their_way_are_not_saved(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model, inner, _ = made("ours overlapped", make_net())
    optimizer = GradAccumOptimizer(inner, 1, model)
    optimizer.backward(mean_loss(model, batch(rank, 0)))
    with pytest.raises(AccumulationError, match="on their way"):
        optimizer.state_dict()
    optimizer.step()
    assert optimizer.state_dict()["accumulation"]["count"] == 0


@ranks(2)
def test_bf16_parameters_with_fp32_gradients_resume_their_fp32_parts(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()

    def fresh() -> tuple[nn.Module, GradAccumOptimizer]:
        model = wrap(make_net(torch.bfloat16), grad_reduce_in_fp32=True)
        inner = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=LR, bf16=True, clip_grad=0.0), [model])
        return model, GradAccumOptimizer(inner, 2, model)

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        x, y = batch(rank, number)
        return (model(x.bfloat16()) - y).pow(2).mean()

    model, optimizer = fresh()
    optimizer.backward(loss(model, 0))
    optimizer.step()
    again, resumed = fresh()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for chunk, each in ((model, optimizer), (again, resumed)):
        each.backward(loss(chunk, 1))
        each.step()
    for ours, want, start in zip(again.parameters(), model.parameters(), make_net().parameters(), strict=True):
        assert torch.equal(ours, want) and want.main_grad.dtype == torch.float32
        assert (want - start).abs().max() > 1e-3

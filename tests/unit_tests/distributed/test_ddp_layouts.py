"""Gradients are right however parameters fall into buckets and buffers."""

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.distributed.buffer.grad_placeholder import GradPlaceholder
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, check_steps, loss_of, make_net, mean_over_ranks, whole_grads, wrap

SETTINGS = [(strategy, overlap) for strategy in ("no_shard", "optim", "optim_grads") for overlap in (False, True)]


class OddShapes(nn.Module):
    """A large parameter among tiny ones, 0-dim ones, and empty ones at either end and in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        f64 = {"dtype": torch.float64}
        self.empty_first = nn.Parameter(torch.empty(0, 3, **f64))
        self.scale = nn.Parameter(torch.tensor(1.5, **f64))
        self.large = nn.Parameter(torch.randn(40, 9, **f64))
        self.empty = nn.Parameter(torch.empty(0, **f64))
        self.tiny = nn.Parameter(torch.randn(1, **f64))
        self.shift = nn.Parameter(torch.tensor(-0.5, **f64))
        self.transposed = nn.Parameter(torch.randn(7, 9, **f64).t())  # not contiguous
        self.empty_last = nn.Parameter(torch.empty(2, 0, **f64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ self.large * self.scale + self.tiny) @ self.transposed + self.shift
        return y.sum() + self.empty.sum() + self.empty_first.sum() + self.empty_last.sum()


def odd_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 100 * step)
    return model(torch.randn(3, 40, generator=generator, dtype=torch.float64)) * (1 + rank)


@ranks(1, 3, nightly=(4,))
def test_large_empty_zero_dim_and_transposed_parameters(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        for options in ({"bucket_size": 1}, {"bucket_size": 50}, {"num_buckets": 3}, {}):
            model = OddShapes()
            plain = copy.deepcopy(model)
            values = {name: param.detach().clone() for name, param in model.named_parameters()}
            ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, **options)
            for name, param in ddp.module.named_parameters():
                assert torch.equal(param, values[name]), f"wrapping changed {name}"
            check_steps(ddp, plain, rank, world, 3, odd_loss)


@ranks(2)
def test_a_model_of_nothing_but_empty_parameters_and_one_without_parameters(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        ddp = wrap(nn.ReLU(), data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        ddp(torch.ones(2))
        finalize_model_grads([ddp])
        assert whole_grads(ddp) == {}
        model = nn.Module()
        model.empty = nn.Parameter(torch.empty(0, 4))
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        for _ in range(2):
            ddp.zero_grad_buffer()
            ddp.module.empty.sum().backward()
            finalize_model_grads([ddp])


@ranks(3)
def test_bucket_options_change_the_buckets_and_not_the_gradients(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    seen = {}
    options: dict[str, dict[str, Any]] = {
        "all in one": {},
        "three buckets": {"num_buckets": 3},
        "by size": {"bucket_size": 60},
        "one a parameter": {"bucket_size": 1},
        "no bucketing": {"bucket_size": 1, "disable_bucketing": True},
        "padded for bandwidth": {"bucket_size": 60, "pad_buckets_for_high_nccl_busbw": True},
    }
    for strategy in ("no_shard", "optim", "optim_grads"):
        for name, option in options.items():
            model = make_net()
            plain = copy.deepcopy(model)
            ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, **option)
            check_steps(ddp, plain, rank, world, 2, loss_of)
            seen[strategy, name] = [bucket.layout.numel for bucket in ddp.grad_buffers[0].buckets]
    # From the last to the first: third 3 + 33, second 77, norm 7 + 7, first 7 + 35, 169 elements in all.
    assert seen["no_shard", "all in one"] == [169]
    assert seen["no_shard", "three buckets"] == [113, 56]  # closes at or above 57
    assert seen["no_shard", "by size"] == [113, 56]
    assert seen["no_shard", "one a parameter"] == [3, 33, 77, 7, 7, 7, 35]
    assert seen["no_shard", "no bucketing"] == [169]
    assert seen["optim", "one a parameter"] == [384] * 7  # lcm(3, 128)
    assert seen["optim", "padded for bandwidth"] == [3 * 2**16] * len(seen["optim", "by size"])
    assert seen["optim", "no bucketing"] == [768]  # the starts at 0 64 128 256 320 384 448, the end at 483


@ranks(3)
def test_rank_shards_of_every_bucket_are_equal_parts_of_the_gradient(rank: int, world: int) -> None:
    """By hand, without the engine's own idea of a shard: rank r's third of each bucket, cut from one process's sum."""
    parallel_state.initialize_model_parallel()
    model = make_net()
    expected = mean_over_ranks(model, world)
    ddp = wrap(model, use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=60)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    for bucket in ddp.grad_buffers[0].buckets:
        flat = torch.zeros(bucket.layout.numel, dtype=torch.float64)
        for slot in bucket.layout.slots:
            start = slot.start - bucket.layout.start
            flat[start : start + slot.end - slot.start] = expected[slot.name].reshape(-1)
        part = bucket.layout.numel // world
        mine = slice(rank * part, (rank + 1) * part)
        assert torch.allclose(bucket.memory.grad[mine], flat[mine], rtol=1e-10, atol=1e-12)
        assert all(isinstance(param.grad, GradPlaceholder) for param in bucket.params)


class Mixed(nn.Module):
    """Three dtypes, a branch of each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.bf16 = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.fp32 = nn.Linear(4, 4, dtype=torch.float32)
        self.fp64 = nn.Linear(4, 4, dtype=torch.float64)
        self.bf16_too = nn.Linear(4, 2, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.bf16, self.fp32, self.fp64, self.bf16_too):
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.double()


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_each_dtype_has_a_buffer_and_all_are_reduced(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    for in_fp32 in (False, True):
        model = Mixed()
        plain = copy.deepcopy(model)
        ddp = wrap(
            model,
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=True,
            bucket_size=1,
            grad_reduce_in_fp32=in_fp32,
        )
        dtypes = {(b.layout.key.param_dtype, b.layout.key.grad_dtype) for b in ddp.grad_buffers}
        halves = "float32" if in_fp32 else "bfloat16"
        assert dtypes == {("bfloat16", halves), ("float32", "float32"), ("float64", "float64")}
        for step in range(2):
            ddp.zero_grad_buffer()
            x = torch.full((2, 4), 1.0 + rank + step)
            ddp(x).sum().backward()
            finalize_model_grads([ddp])
            grads = []
            for r in range(world):  # the same dtypes on one process: the forward must round alike
                plain.zero_grad(set_to_none=True)
                plain(torch.full((2, 4), 1.0 + r + step)).sum().backward()
                grads.append({name: param.grad.double() for name, param in plain.named_parameters()})
            expected = {name: sum(g[name] for g in grads) / world for name in grads[0]}
            got = whole_grads(ddp)
            for name, want in expected.items():
                exact = "bf16" not in name
                bound = 1e-6 if exact else 2e-2
                assert (got[name].double() - want).norm() <= bound * want.norm(), name
                assert want.norm() > 1e-3, name


class Thousands(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((3,), 1.0)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.stack(list(self.weights)) * x).sum()


@pytest.mark.nightly
@ranks(2, timeout_s=120)
def test_ten_thousand_parameters_wrap_in_linear_time_and_train(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()

    def seconds_to_wrap(count: int, strategy: str) -> float:
        model = Thousands(count)
        dist.barrier()
        begun = time.process_time()
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=20_000)
        spent = time.process_time() - begun
        ddp(torch.tensor(1.0 + rank)).backward()
        finalize_model_grads([ddp])
        grads = torch.stack(list(whole_grads(ddp).values()))
        assert torch.equal(grads, torch.full((count, 3), 1.5))  # the mean of 1 and 2
        return spent

    for strategy in ("no_shard", "optim", "optim_grads"):
        small, large = seconds_to_wrap(2_500, strategy), seconds_to_wrap(10_000, strategy)
        assert large < 8 * small + 0.2, f"{strategy}: {small:.2f} s for 2 500 and {large:.2f} s for 10 000 parameters"


@ranks(2)
def test_gradients_are_views_of_the_buffer_and_main_grad_is_grad(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        if strategy == "optim_grads":
            continue
        ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        (buffer,) = ddp.grad_buffers
        memory = buffer.grad_data.untyped_storage().data_ptr()
        for param in ddp.parameters():
            assert param.grad is param.main_grad
            assert param.main_grad.untyped_storage().data_ptr() == memory
            assert param.main_grad.shape == param.shape
        with ddp.no_sync():
            loss_of(ddp, rank, 0).backward()
        assert all(param.grad is param.main_grad and param.main_grad.norm() > 0 for param in ddp.parameters())
        finalize_model_grads([ddp])
        whole = strategy == "no_shard"
        sharded = (isinstance(param.grad, GradPlaceholder) for param in ddp.parameters())
        assert all((param.grad is param.main_grad) for param in ddp.parameters()) if whole else all(sharded)


@ranks(2)
def test_scale_gradients_scales_what_is_valid_and_zero_grad_buffer_zeroes_all(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        expected = mean_over_ranks(model, world)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=60)
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        ddp.scale_gradients(0.5)
        ddp.scale_gradients(torch.tensor(3.0))
        assert_same(whole_grads(ddp), {name: 1.5 * grad for name, grad in expected.items()})
        ddp.zero_grad_buffer()
        assert all(buffer.grad_data.count_nonzero() == 0 for buffer in ddp.grad_buffers)
        assert all(param.grad is param.main_grad for param in ddp.parameters())


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("whole", [True, "all"])
@pytest.mark.in_suite()
def test_whole_parameters_in_shards_change_no_gradient(rank: int, world: int, overlap: bool, whole: Any) -> None:
    parallel_state.initialize_model_parallel()
    expected = mean_over_ranks(make_net(width=40), world)
    ddp = wrap(
        make_net(width=40),
        use_distributed_optimizer=True,
        keep_params_whole=whole,
        overlap_grad_reduce=overlap,
        bucket_size=50,
    )
    for _ in range(2):
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), expected)
    for bucket in ddp.grad_buffers[0].buckets:
        low, high = bucket.shard_range
        for slot in bucket.layout.slots:
            if len(slot.shape) == 2 or whole == "all":
                inside = [
                    low + bucket.layout.start <= place < high + bucket.layout.start
                    for place in (slot.start, slot.end - 1)
                ]
                assert inside[0] == inside[1], slot.name

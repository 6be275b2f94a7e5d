"""Strategy optim_grads: a rank keeps its shard of the gradients, whole ones only pass through a small pool."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, SyncError, finalize_model_grads
from core.distributed.buffer.bucket_pool import POOL_BUCKETS
from core.distributed.buffer.grad_placeholder import GradPlaceholder
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap


def streamed(model: nn.Module, config: Any = None, **options: Any) -> DistributedDataParallel:
    options = {"bucket_size": 40, "overlap_grad_reduce": True, **options}
    return wrap(model, config, data_parallel_sharding_strategy="optim_grads", **options)


def accumulate(ddp: DistributedDataParallel, rank: int, microbatches: range) -> None:
    for microbatch in microbatches[:-1]:
        with ddp.no_sync():
            loss_of(ddp, rank, microbatch).backward()
    loss_of(ddp, rank, microbatches[-1]).backward()


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("reduce_microbatches", ["last", "every"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.in_suite()
def test_accumulated_gradients_equal_one_process(
    rank: int, world: int, overlap: bool, reduce_microbatches: str
) -> None:
    parallel_state.initialize_model_parallel()
    plain = make_net()
    ddp = streamed(make_net(), overlap_grad_reduce=overlap, reduce_microbatches=reduce_microbatches)
    for step in range(3):
        microbatches = range(4 * step, 4 * step + 1 + step)  # 1, 2, then 3 of them
        before = range(0)
        if step != 1:
            ddp.zero_grad_buffer()
        else:
            before = range(1)  # not zeroed: the first step's gradient is added to
        accumulate(ddp, rank, microbatches)
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (*before, *microbatches)))
        assert all(isinstance(p.grad, GradPlaceholder) and p.main_grad is None for p in ddp.parameters())


@ranks(3)
def test_every_microbatch_is_reduced_and_sent(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    sent = {}
    for reduce_microbatches in ("last", "every"):
        ddp = streamed(make_net(), reduce_microbatches=reduce_microbatches, deterministic_reduction=True)
        accumulate(ddp, rank, range(3))
        finalize_model_grads([ddp])
        sent[reduce_microbatches] = ddp.step_report().bytes_sent
        text = ddp.describe()
        once = ddp.grad_buffers[0].numel * 8 * 2 // 3
        assert f"sends {once} a step; 'every' keeps no more and sends k x {once}" in text
        assert f"reduce_microbatches={reduce_microbatches!r}" in text
        del ddp  # else the next one shares its wire, and reduces in finalize
    assert abs(sent["last"] - once) <= 10 and abs(sent["every"] - 3 * once) <= 30


class Half(nn.Module):
    """Two branches, so that a rank can leave one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left = nn.Linear(5, 9, dtype=torch.float64)
        self.right = nn.Linear(5, 9, dtype=torch.float64)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return {"left": self.left, "right": self.right}[which](x)


@ranks(3)
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_may_use_other_parameters_in_each_backward(rank: int, world: int, overlap: bool) -> None:
    parallel_state.initialize_model_parallel()
    used = {0: ["left", "left"], 1: ["right", "left"], 2: ["left", "right"]}
    plain = Half()
    for step in range(2):
        for r in range(world):
            for n, which in enumerate(used[r]):
                x = torch.full((2, 5), 1.0 + r + 3 * n + step, dtype=torch.float64)
                (plain(x, which).square().sum() / world).backward()
    ddp = streamed(Half(), reduce_microbatches="every", overlap_grad_reduce=overlap, bucket_size=10)
    total = {name: torch.zeros_like(param) for name, param in ddp.module.named_parameters()}
    for step in range(2):
        for n, which in enumerate(used[rank]):
            x = torch.full((2, 5), 1.0 + rank + 3 * n + step, dtype=torch.float64)
            ddp(x, which).square().sum().backward()
        finalize_model_grads([ddp])
        for name, grad in whole_grads(ddp).items():
            total[name] += grad
        ddp.zero_grad_buffer()
    assert_same(total, {name: param.grad for name, param in plain.named_parameters()})


def backwards(ddp: DistributedDataParallel, rank: int, count: int) -> None:
    for microbatch in range(count):
        loss_of(ddp, rank, microbatch).backward()


@ranks(2, timeout_s=20)
@pytest.mark.parametrize("twin", [True, False], ids=["gloo twin", "one group"])
@pytest.mark.parametrize("counts", [(0, 1), (1, 3), (2, 1)], ids=str)
@pytest.mark.in_suite()
def test_unequal_numbers_of_backwards_add_up(rank: int, world: int, counts: tuple[int, int], twin: bool) -> None:
    """A rank that has fewer adds zeros, also where parameters are sharded and no gather needs the other ranks."""
    parallel_state.initialize_model_parallel(create_gloo_process_groups=twin)
    model = make_net()
    plain = copy.deepcopy(model)
    for r, count in enumerate(counts):
        for microbatch in range(count):
            (loss_of(plain, r, microbatch) / world).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for strategy, options in (
        ("optim_grads", {"deterministic_reduction": True}),
        ("optim_grads", {"overlap_grad_reduce": False, "share_host_memory": False}),
        ("optim_grads_params", {}),
    ):
        options = {"bucket_size": 40, "overlap_grad_reduce": True, "reduce_microbatches": "every", **options}
        ddp = wrap(copy.deepcopy(model), data_parallel_sharding_strategy=strategy, **options)
        if min(counts) > 0:
            backwards(ddp, rank, counts[rank])
            ddp.zero_grad_buffer()  # on all ranks: the step is dropped
        backwards(ddp, rank, counts[rank])
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), expected)
        ddp.zero_grad_buffer()
        backwards(ddp, rank, 2)
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), mean_over_ranks(model, world, range(2)))


@ranks(2, timeout_s=20)
def test_a_step_that_one_rank_drops_in_its_middle_is_refused_on_all_ranks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = streamed(make_net(), reduce_microbatches="every")
    backwards(ddp, rank, 1)
    words = r"do not drop a step together: rank 0 ends its step, rank 1 drops its step \(zero_grad\)"
    with pytest.raises(SyncError, match=words):
        if rank == 1:
            ddp.zero_grad_buffer()
        backwards(ddp, rank, 1)
        finalize_model_grads([ddp])


class Parallel(nn.Module):
    """Layers in any of which a parameter may be left out, without changing when the others' gradients come."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(5))

    def forward(self, x: torch.Tensor, left_out: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != left_out:
                x = x + torch.tanh(layer(x))
        return x


def parallel_loss(model: nn.Module, rank: int, microbatch: int) -> torch.Tensor:
    """Rank 0 leaves the parameters of the first bucket out of its second microbatch."""
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    return model(x, 4 if (rank, microbatch) == (0, 1) else -1).pow(2).sum()


@ranks(2, timeout_s=20)
@pytest.mark.parametrize("overlap", [False, True])
def test_buckets_of_a_later_round_fill_in_their_turn(rank: int, world: int, overlap: bool) -> None:
    """Else they take the pool's memory from the bucket before them, which the other ranks read there."""
    parallel_state.initialize_model_parallel()
    torch.manual_seed(2)
    model = Parallel()
    expected = mean_over_ranks(model, world, range(3), parallel_loss)
    ddp = streamed(model, overlap_grad_reduce=overlap, reduce_microbatches="every")
    for microbatch in range(3):
        parallel_loss(ddp, rank, microbatch).backward()
        pool = ddp.grad_buffers[0].pool
        assert pool is not None
        held = [bucket.memory.grad for bucket in ddp.grad_buffers[0].buckets if bucket.memory.views]
        assert all(any(memory is part for part in pool.held) for memory in held)
    finalize_model_grads([ddp])
    assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_memory_is_the_shard_and_a_pool_of_two_buckets(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(12)))
    for reduce_microbatches in ("last", "every"):
        ddp = streamed(copy.deepcopy(model), bucket_size=1024, reduce_microbatches=reduce_microbatches)
        (buffer,) = ddp.grad_buffers
        assert len(buffer.buckets) == 12 and all(bucket.memory.pool is buffer.pool for bucket in buffer.buckets)
        assert buffer.grad_data.numel() == 12 * 1024 // 2
        for _ in range(2):
            ddp.zero_grad_buffer()
            for _ in range(3):
                with ddp.no_sync():
                    ddp(torch.ones(1, 32)).sum().backward()
                held = sum(type(param.grad) is torch.Tensor for param in ddp.parameters())
                assert held == (12 if reduce_microbatches == "last" else 0)
            ddp(torch.ones(1, 32)).sum().backward()
            finalize_model_grads([ddp])
            assert buffer.pool is not None and not buffer.pool.in_flight
            assert buffer.pool.held == [None] * POOL_BUCKETS
            assert not any(bucket.memory.views for bucket in buffer.buckets)
        del ddp, buffer  # else the next one shares its wire, and reduces in finalize


@ranks(1)
def test_buckets_are_small_by_default_with_and_without_overlap(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Sequential(*(nn.Linear(896, 1000, bias=False) for _ in range(3)))  # 896 000 elements each
    for overlap in (False, True):
        ddp = wrap(
            copy.deepcopy(model),
            data_parallel_sharding_strategy="optim_grads",
            overlap_grad_reduce=overlap,
            disable_bucketing=not overlap,
        )
        assert [bucket.layout.numel for bucket in ddp.grad_buffers[0].buckets] == [896_000] * 3
        pool = ddp.grad_buffers[0].pool
        assert pool is not None and pool.memory.numel() == POOL_BUCKETS * 896_000


@ranks(4)
def test_optimizer_instances_add_their_shards_once(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    for reduce_microbatches in ("last", "every"):
        plain = make_net()
        ddp = streamed(make_net(), num_distributed_optimizer_instances=2, reduce_microbatches=reduce_microbatches)
        for step in range(2):
            ddp.zero_grad_buffer()
            accumulate(ddp, rank, range(2 * step, 2 * step + 2))
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (2 * step, 2 * step + 1)))


@ranks(2)
def test_whole_gradients_are_gathered_when_asked_for(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for reduce_microbatches in ("last", "every"):
        plain = make_net()
        ddp = streamed(make_net(), reduce_microbatches=reduce_microbatches)
        for step in range(2):
            ddp.zero_grad_buffer()
            accumulate(ddp, rank, range(2 * step, 2 * step + 2))
            finalize_model_grads([ddp], force_all_reduce=True)
            expected = mean_over_ranks(plain, world, (2 * step, 2 * step + 1))
            assert_same({name: param.grad for name, param in ddp.module.named_parameters()}, expected)
            for bucket in ddp.grad_buffers[0].buckets:  # and what the optimizer reads says the same
                low, high = bucket.shard_range
                torch.testing.assert_close(bucket.memory.owned_grad, bucket.memory.grad[low:high])


@ranks(2)
def test_tokens_and_scaling(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    mean = mean_over_ranks(make_net(), world, (0, 1))
    for reduce_microbatches in ("last", "every"):
        ddp = streamed(
            make_net(), SimpleNamespace(calculate_per_token_loss=True), reduce_microbatches=reduce_microbatches
        )
        accumulate(ddp, rank, range(2))
        ddp.finish_grad_sync()
        ddp.scale_gradients(3.0)
        finalize_model_grads([ddp], torch.tensor(5 * rank + 1))
        assert_same(whole_grads(ddp), {name: grad * world * 3 / 7 for name, grad in mean.items()})


@ranks(2)
def test_a_failed_backward_is_dropped_with_what_had_left(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for reduce_microbatches in ("last", "every"):
        plain = make_net()
        ddp = streamed(make_net(), reduce_microbatches=reduce_microbatches)

        def fail(_grad: torch.Tensor) -> None:
            raise RuntimeError("the user's own")

        handle = ddp.module.norm.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="the user's own"):
            loss_of(ddp, rank, 0).backward()
        handle.remove()
        ddp.zero_grad_buffer()
        accumulate(ddp, rank, range(1, 3))
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (1, 2)))


@ranks(2)
def test_a_torch_optimizer_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = streamed(make_net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loss_of(ddp, rank, 0).backward()
    with pytest.raises(SyncError, match="not reduced"):
        optimizer.step()
    finalize_model_grads([ddp])
    with pytest.raises(SyncError, match="are sharded"):
        optimizer.step()


@ranks(1)
def test_every_microbatch_is_refused_with_virtual_chunks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="set reduce_microbatches='last'"):
        streamed(make_net(), config, reduce_microbatches="every")


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match="'each' is not one of"):
        DistributedDataParallelConfig(reduce_microbatches="each")  # type: ignore[arg-type]


@ranks(2)
def test_a_bf16_model_accumulates_in_fp32(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    plain = make_net(torch.bfloat16)
    for reduce_microbatches in ("last", "every"):
        ddp = streamed(make_net(torch.bfloat16), grad_reduce_in_fp32=True, reduce_microbatches=reduce_microbatches)
        assert ddp.grad_buffers[0].grad_data.dtype == torch.float32
        accumulate(ddp, rank, range(4))
        finalize_model_grads([ddp])
        # bf16 backwards: what is compared is the scale of the sum, far above their rounding
        assert_same(whole_grads(ddp), mean_over_ranks(plain, world, range(4)), rtol=3e-2)

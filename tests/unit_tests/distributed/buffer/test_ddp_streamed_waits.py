"""Strategy optim_grads: backward waits for memory, and ranks that wait for each other all go on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, finalize_model_grads
from tests.unit_tests.distributed.wire.test_shared_memory import at_once, channels_of
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, whole_grads, wrap

LAYERS = 8


class Layers(nn.Module):
    """A bucket each, any of which can be left out; the last one's gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, left_out: set[int]) -> torch.Tensor:
        used = [layer for number, layer in enumerate(self.layers) if number not in left_out]
        return sum((layer(x).square().sum() for layer in used), torch.zeros((), dtype=torch.float64))


def streamed(module: nn.Module, reduce_microbatches: str = "every", **options: Any) -> DistributedDataParallel:
    """A bucket for each parameter, under overlap unless `options` say otherwise."""
    options = {"bucket_size": 1, "overlap_grad_reduce": True, "reduce_microbatches": reduce_microbatches, **options}
    return wrap(module, data_parallel_sharding_strategy="optim_grads", **options)


def inputs_of(rank: int, step: int, microbatch: int) -> torch.Tensor:
    return torch.tensor([1.0 + rank, 2.0 - step + 3 * microbatch], dtype=torch.float64)


@ranks(2, timeout_s=30)
@pytest.mark.parametrize("share", [False, True], ids=["sockets", "memory"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("reduce_microbatches", ["last", "every"])
@pytest.mark.parametrize("left_out", [{0}, {LAYERS - 1}, set(range(LAYERS)) - {3}], ids=["last", "first", "most"])
@pytest.mark.in_suite()
def test_a_rank_may_leave_out_parameters_whose_buckets_others_wait_for(
    rank: int, world: int, left_out: set[int], reduce_microbatches: str, overlap: bool, share: bool
) -> None:
    """In another microbatch each; their buckets leave at the end of its backward, or in finalize."""
    parallel_state.initialize_model_parallel()
    ddp = streamed(Layers(), reduce_microbatches, overlap_grad_reduce=overlap, share_host_memory=share)
    assert len(ddp.grad_buffers[0].buckets) == LAYERS
    plain = Layers()
    plain.load_state_dict(ddp.module.state_dict())
    for step in range(3):
        plain.zero_grad()
        for r in range(world):
            for n in range(2):
                (plain(inputs_of(r, step, n), left_out if n == r else set()) / world).backward()
        ddp.zero_grad_buffer()
        for n in range(2):
            ddp(inputs_of(rank, step, n), left_out if n == rank else set()).backward()
        finalize_model_grads([ddp])
        expected = {name: param.grad for name, param in plain.named_parameters()}
        assert min(float(grad.abs().max()) for grad in expected.values()) > 0.1
        assert_same(whole_grads(ddp), expected)
        assert not any(buffer.pool.in_flight for buffer in ddp.grad_buffers)


class TwoDtypes(nn.Module):
    """Layers of two dtypes in turn, so that the buckets of two buffers, each with its memory, leave in turn."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float64, torch.float32] * (LAYERS // 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor, left_out: set[int]) -> torch.Tensor:
        used = [layer for number, layer in enumerate(self.layers) if number not in left_out]
        losses = [layer(x.to(layer.weight.dtype)).double().square().sum() for layer in used]
        return sum(losses, torch.zeros((), dtype=torch.float64))


@ranks(3, timeout_s=30)
@pytest.mark.parametrize("share", [False, True], ids=["sockets", "memory"])
@pytest.mark.parametrize("reduce_microbatches", ["last", "every"])
@pytest.mark.in_suite()
def test_buffers_of_two_dtypes_wait_in_turn(rank: int, world: int, reduce_microbatches: str, share: bool) -> None:
    """Ranks that are early or late by turns, each without a gradient of the bucket that another one waits for."""
    parallel_state.initialize_model_parallel()
    ddp = streamed(TwoDtypes(), reduce_microbatches, deterministic_reduction=True, share_host_memory=share)
    assert [len(buffer.buckets) for buffer in ddp.grad_buffers] == [LAYERS // 2] * 2
    plain = TwoDtypes()
    plain.load_state_dict(ddp.module.state_dict())
    left_out = {(r, n): {(2 * r + n) % LAYERS, (5 * r + 3 * n) % LAYERS} for r in range(world) for n in range(3)}
    for step in range(2):
        plain.zero_grad()
        for (r, n), without in left_out.items():
            (plain(inputs_of(r, step, n), without) / world).backward()
        ddp.zero_grad_buffer()
        for n in range(3):
            time.sleep(0.03 * ((rank + n) % world))
            ddp(inputs_of(rank, step, n), left_out[rank, n]).backward()
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), {name: param.grad for name, param in plain.named_parameters()}, rtol=1e-5)


@ranks(2, timeout_s=20)
@pytest.mark.parametrize("share", [False, True], ids=["sockets", "memory"])
def test_more_backwards_on_one_rank_add_up_with_two_dtypes(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = streamed(TwoDtypes(), deterministic_reduction=True, share_host_memory=share)
    plain = TwoDtypes()
    plain.load_state_dict(ddp.module.state_dict())
    for r, n in ((0, 0), (1, 0), (1, 1)):
        (plain(inputs_of(r, 0, n), set()) / world).backward()
    for n in range(1 + rank):
        ddp(inputs_of(rank, 0, n), set()).backward()
    finalize_model_grads([ddp])
    assert_same(whole_grads(ddp), {name: param.grad for name, param in plain.named_parameters()}, rtol=1e-5)


@ranks(2, timeout_s=30)
@pytest.mark.parametrize("share", [False, True], ids=["sockets", "memory"])
def test_with_deterministic_reduction_a_late_rank_changes_no_bit(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()

    def make() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))

    def loss_of(module: nn.Module, r: int, microbatch: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * r + microbatch))
        loss: torch.Tensor = module(x.to(dtype)).square().sum()
        return loss

    plain = make().double()
    for r in range(world):
        for microbatch in range(3):
            (loss_of(plain, r, microbatch, torch.float64) / world).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    ddp = streamed(make(), deterministic_reduction=True, share_host_memory=share)
    found = []
    for late in (False, True):
        ddp.zero_grad_buffer()
        for microbatch in range(3):
            if late and rank == 1 and microbatch == 1:
                time.sleep(0.3)
            loss_of(ddp, rank, microbatch, torch.float32).backward()
        finalize_model_grads([ddp])
        found.append(whole_grads(ddp))
        assert_same(found[-1], expected, rtol=1e-5)
    assert all(torch.equal(found[0][name], found[1][name]) for name in expected)


@ranks(2, timeout_s=20)
@pytest.mark.parametrize("share", [False, True], ids=["sockets", "memory"])
@pytest.mark.parametrize("count", [1, 2], ids=["one model", "two models"])
def test_a_step_that_is_saved_in_its_middle_holds_every_gradient(
    rank: int, world: int, count: int, share: bool
) -> None:
    """Also of two models on one wire, whose buckets backward has not launched."""
    parallel_state.initialize_model_parallel()
    plain = [Layers() for _ in range(count)]
    for number, module in enumerate(plain):
        torch.manual_seed(7 + number)
        for param in module.parameters():
            nn.init.normal_(param)
        for r in range(world):
            for n in range(2):
                (module(inputs_of(r, number, n), set()) / world).backward()

    def make() -> list[DistributedDataParallel]:
        modules = [Layers() for _ in plain]
        for module, source in zip(modules, plain, strict=True):
            module.load_state_dict(source.state_dict())
        return [streamed(module, share_host_memory=share) for module in modules]

    first = make()
    for number, ddp in enumerate(first):
        ddp(inputs_of(rank, number, 0), set()).backward()
    saved = [ddp.reduced_so_far() for ddp in first]
    assert all(param.grad is None for ddp in first for param in ddp.module.parameters())
    dist.barrier()  # as writing a checkpoint has one
    second = make()
    for ddp, reduced in zip(second, saved, strict=True):
        ddp.restore_reduced(reduced)
    for models in (first, second):  # the step goes on, and from what was saved
        for number, ddp in enumerate(models):
            ddp(inputs_of(rank, number, 1), set()).backward()
        for ddp, module in zip(models, plain, strict=True):
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), {name: param.grad for name, param in module.named_parameters()})


def test_polling_does_nothing_of_a_reduction_before_the_same_of_an_earlier_one() -> None:
    channels, tensors = channels_of(2, 8)
    for rank, tensor in enumerate(tensors):
        tensor.fill_(rank + 1.0)
    mine = [channels[0].all_reduce(tensors[0][:4]), channels[0].reduce_scatter(tensors[0][4:])]
    assert not mine[1].is_done() and [handle.stage for handle in mine] == [0, 0]
    real, looks = channels[0].has, []

    def comes_after_the_first_look(stage: int, number: int) -> bool:
        looks.append(number)
        return len(looks) > 1

    channels[0].has = comes_after_the_first_look  # type: ignore[method-assign]
    channels[0].progress()
    assert looks == [1] and [handle.stage for handle in mine] == [0, 0]
    channels[0].has = real  # type: ignore[method-assign]
    theirs = [channels[1].all_reduce(tensors[1][:4])]
    assert not mine[1].is_done() and [handle.stage for handle in mine] == [1, 0]
    theirs.append(channels[1].reduce_scatter(tensors[1][4:]))
    # The second one's only stage is its first, which the first one has done: it waits for no copies.
    assert not mine[1].is_done() and [handle.stage for handle in mine] == [1, 1]
    assert theirs[1].is_done() and [handle.stage for handle in theirs] == [2, 1]
    assert mine[1].is_done() and mine[0].is_done() and [handle.stage for handle in mine] == [2, 1]
    at_once([handle.wait for handle in (*mine, *theirs)])
    assert tensors[0].tolist() == [3.0] * 6 + [1.0] * 2
    assert tensors[1].tolist() == [3.0] * 4 + [2.0] * 2 + [3.0] * 2

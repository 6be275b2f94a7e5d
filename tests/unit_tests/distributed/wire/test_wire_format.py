"""Buckets travel in another dtype: what arrives is the sum of what was rounded, in the memory that it came from."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.distributed import DistributedDataParallelConfig, finalize_model_grads
from core.distributed.wire.collectives import Collectives
from core.distributed.wire.formats import gradient_collectives
from core.distributed.wire.fp8_communication import FP8
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap


def values_of(rank: int) -> torch.Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(rank)) * 3


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FP8], ids=str)
def test_reductions_round_once_and_come_back(rank: int, world: int, dtype: torch.dtype) -> None:
    group = dist.group.WORLD
    for ordered in (False, True):
        plain = Collectives(ordered=ordered)
        wire = gradient_collectives(dtype, plain)
        assert wire.traffic is plain.traffic
        exact = sum((values_of(r).double() for r in range(world)), torch.zeros(12, dtype=torch.float64))
        largest = torch.stack([values_of(r).abs() for r in range(world)]).sum(0).max()
        # Each contribution is rounded; then each of `world` sums (in 16 bits), or the sum once more (8 bits).
        bound = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, FP8: 2**-4}[dtype] * (world + 1)
        part = slice(rank * (12 // world), (rank + 1) * (12 // world))
        for op in ("sum", "mean"):
            divisor = world if op == "mean" else 1
            for call, where in ((wire.all_reduce, slice(None)), (wire.reduce_scatter, part)):
                tensor = values_of(rank)
                handle = call(tensor, group, "test", op)  # type: ignore[operator]
                handle.wait()
                error = (tensor[where].double() - exact[where] / divisor).abs().max()
                assert error <= bound * largest / divisor, (op, call, ordered)
                if world > 1 and dtype is not torch.float32:
                    assert error > 0, "nothing was rounded, so nothing travelled in the dtype"
                if world == 1:
                    assert torch.equal(tensor, values_of(rank))


@ranks(2)
def test_a_model_is_reduced_so_late_gradients_too(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for dtype, rtol in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3), (FP8, 0.13)):
        for options in ({}, {"overlap_grad_reduce": True}, {"data_parallel_sharding_strategy": "optim_grads"}):
            model = make_net()
            ddp = wrap(model, grad_communication_dtype=dtype, bucket_size=60, **options)
            for backward in range(2):  # the second comes after buckets have left
                loss_of(ddp, rank, backward).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), mean_over_ranks(make_net(), world, (0, 1)), rtol=rtol)


@ranks(2)
def test_inf_and_nan_arrive(rank: int, world: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, FP8):
        for bad in (torch.inf, torch.nan):
            tensor = torch.ones(4)
            tensor[1] = bad if rank == 1 else 1.0
            gradient_collectives(dtype, Collectives()).all_reduce(tensor, dist.group.WORLD, "test").wait()
            assert not tensor[1].isfinite()
    tensor = torch.full((4,), 1e6)
    gradient_collectives(torch.float16, Collectives()).all_reduce(tensor, dist.group.WORLD, "test").wait()
    assert not tensor.isfinite().any(), "beyond fp16's range is an error, not clipped"


def test_a_dtype_that_cannot_travel_is_refused() -> None:
    wrong: Any = torch.int8
    with pytest.raises(
        ValueError, match="grad_communication_dtype torch.int8 is not one of torch.float32, torch.bfloat16"
    ):
        DistributedDataParallelConfig(grad_communication_dtype=wrong)

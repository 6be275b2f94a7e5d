"""Strategy optim_grads_params: what a rank holds at most, read from the engine and from all tensors that there are."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.memory import mapped_from_peers, storages
from benchmarks.workloads import WORKLOADS
from core import parallel_state
from core.distributed import DistributedDataParallel, Placement, finalize_model_grads, materialize
from core.distributed.buffer.grad_attribute import attributes_alone
from core.distributed.sharded.param_unit import AllGather, ParamUnit
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

# -- a frozen base ----------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer, and next to it a trained detour of rank 8, or its input."""

    def __init__(self, width: int, trained: bool) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        detour = (nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)) if trained else ()
        self.adapter = nn.Sequential(*detour)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def held_of_a_frozen_base(world: int, layers: int, width: int, plain: int) -> float:
    """What a rank keeps of the base between steps, as a part of it; the first `plain` layers have no adapter."""
    parallel_state.initialize_model_parallel()
    with torch.device("meta"):
        model: Any = nn.Sequential(*(Adapted(width, number >= plain) for number in range(layers)))
    base = 4 * layers * width * width
    options: dict[str, Any] = {"bucket_size": width * width, "share_host_memory": False}
    complete, gathers = ParamUnit.finish_all_gather, Counter[str]()

    def counted(self: ParamUnit, gather: AllGather) -> torch.Tensor:
        gathers.update(name for name in self.names if "base" in name)
        return complete(self, gather)

    def init(part: Any) -> None:
        for param in part.parameters(recurse=False):
            nn.init.normal_(param, std=0.5 * width**-0.5)

    with mock.patch.object(ParamUnit, "finish_all_gather", counted):
        ddp = wrap(materialize(model, init), data_parallel_sharding_strategy="optim_grads_params", **options)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01), [ddp])
        for _ in range(3):
            gathers.clear()
            optimizer.zero_grad()
            ddp(torch.ones(2, width)).square().mean().backward()
            finalize_model_grads([ddp])
            assert optimizer.step()[0]
            # The last layer's is still whole when backward begins, and no gradient passes the first adapter.
            wanted = {f"{n}.base.weight": 2 if plain < n < layers - 1 else 1 for n in range(layers)}
            assert gathers == wanted
    unsharder: Any = ddp.engine.params
    frozen = [unit for unit in unsharder.units if not unit.params[0].requires_grad]
    shards, blocks = sum(unit.shard.nbytes for unit in frozen), frozen[0].blocks
    while blocks.lent:  # gloo's thread lets go of a bucket a moment after it has arrived
        time.sleep(0.01)
    kept = sum(map(len, blocks.free))
    assert shards == base // world and kept == 3 * 4 * width * width
    assert sum(of.layout.numel for of in ddp.reducer.buckets) < 1.05 * 16 * width * (layers - plain)
    return (shards + kept) / base


@ranks(2)
def test_a_frozen_base_is_gathered_where_a_gradient_passes_and_three_buckets_are_kept(rank: int, world: int) -> None:
    assert held_of_a_frozen_base(world, 12, 64, plain=4) == 1 / 2 + 3 / 12


@pytest.mark.nightly
@ranks(4, timeout_s=300.0)
def test_of_a_frozen_base_of_50_million_a_rank_has_27_percent_at_most(rank: int, world: int) -> None:
    assert held_of_a_frozen_base(world, 191, 512, plain=64) <= 0.27


# -- the formula ------------------------------------------------------------------------------------------------------

WIDTHS = (64, 512, 256, 1024, 128, 768, 64)
NUMELS = [one * other for one, other in zip(WIDTHS, WIDTHS[1:], strict=False)]
NEIGHBOURS = 512 * 256 + 256 * 1024  # the two longest that follow each other
KEPT = {  # options, and how many elements of parameters are whole besides
    "mapped": ({"share_host_memory": True}, -NEIGHBOURS),
    "no gather ahead": ({"placement": Placement(prefetch=0)}, 0),
    "one gather ahead": ({}, 1024 * 128),
    "whole until backward": ({"reshard_after_forward": False}, sum(NUMELS) - NEIGHBOURS),
    "whole until the step": ({"placement": Placement(shard_param_frac=0.0)}, sum(NUMELS) - NEIGHBOURS),
}
BYTES = {torch.float32: (4, 4, 0), torch.bfloat16: (2, 4, 4)}  # of a parameter, a gradient, a master


def union(spans: Iterable[tuple[int, int]]) -> int:
    """Bytes of all spans (address, nbytes) together. Memory of several tensors may overlap."""
    total = reached = 0
    for begin, nbytes in sorted(spans):
        total += max(0, begin + nbytes - max(begin, reached))
        reached = max(reached, begin + nbytes)
    return total


def held_between_steps(ddp: DistributedDataParallel, before: Collection[int]) -> int:
    """Bytes of all tensors that were not there before.

    What other ranks hold, and this one maps, is not counted; of memory that holds the shards of all, a rank's part is.
    All ranks have made such memory, and use the first one's: no one has touched the pages of the others.
    """
    gc.collect()
    with attributes_alone():  # a look at a sharded parameter gathers nothing
        found = {place: of.nbytes() for place, of in storages().items() if place not in before}
    unsharder: Any = ddp.engine.params
    if not unsharder.units:
        return union((place, found[place]) for place in found.keys() - mapped_from_peers(ddp))
    of_all = {unit.mapped.untyped_storage().data_ptr() for unit in unsharder.units if unit.mapped is not None}
    unused = {of.tensor.untyped_storage().data_ptr() for one in unsharder.channels for of in one.members} - of_all
    theirs = union((place, found[place]) for place in (mapped_from_peers(ddp) | unused) & found.keys())
    shared = union((place, found[place]) for place in of_all)
    return union(found.items()) - theirs - shared + shared // dist.get_world_size()


@contextmanager
def gathers_watched(ddp: DistributedDataParallel) -> Iterator[list[int]]:
    """Yields a list that gets, at each gather, the bytes of all whole buckets of parameters."""
    unsharder: Any = ddp.engine.params
    launch, seen = ParamUnit.start_all_gather, [0]

    def launched(unit: ParamUnit, *arguments: Any) -> AllGather:
        gather = launch(unit, *arguments)
        whole = [one.full for one in unsharder.units if one.full is not None]
        seen.append(sum(tensor.nbytes for tensor in (*whole, gather.full)))
        return gather

    with mock.patch.object(ParamUnit, "start_all_gather", launched):
        yield seen


def trained_model(dtype: torch.dtype, **options: Any) -> tuple[DistributedDataParallel, Any]:
    torch.manual_seed(0)
    layers = (nn.Linear(one, other, bias=False) for one, other in zip(WIDTHS, WIDTHS[1:], strict=False))
    options = {"bucket_size": 1, "share_host_memory": False, "grad_reduce_in_fp32": True, **options}
    ddp = wrap(
        nn.Sequential(*layers).to(dtype), data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True, **options,
    )  # fmt: skip
    return ddp, get_megatron_optimizer(OptimizerConfig(lr=0.01, bf16=dtype is torch.bfloat16), [ddp])


@ranks(2, 4)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", list(BYTES))
@pytest.mark.in_suite()
def test_a_rank_holds_its_shards_and_two_neighbouring_buckets(
    rank: int, world: int, kept: str, dtype: torch.dtype
) -> None:
    parallel_state.initialize_model_parallel()
    options, besides = KEPT[kept]
    of_param, of_grad, of_master = BYTES[dtype]
    before = storages().keys()
    ddp, optimizer = trained_model(dtype, **options)
    for step in range(3):
        optimizer.zero_grad()
        with gathers_watched(ddp) as seen:
            ddp(torch.ones(1, WIDTHS[0], dtype=dtype)).float().square().mean().backward()
            finalize_model_grads([ddp])
        assert optimizer.step()[0], step
    held = held_between_steps(ddp, before) - optimizer.scratch.nbytes
    shards = sum(NUMELS) * (of_param + of_grad + of_master + 8) / world
    assert max(seen) == (NEIGHBOURS + besides) * of_param
    assert 0.98 < held / (shards + NEIGHBOURS * of_grad) < 1.05, (held, shards)


@pytest.mark.nightly
@ranks(4, timeout_s=300.0)
def test_of_51_million_a_rank_holds_less_than_55_percent_of_what_a_sharded_optimizer_needs(
    rank: int, world: int
) -> None:
    """Parameters, gradients, moments and the memory of whole gradients; activations are alike, and not counted."""
    parallel_state.initialize_model_parallel()
    workload, held = WORKLOADS["gpt51m"], {}
    for strategy in ("optim", "optim_grads_params"):
        before = storages().keys()
        ddp = wrap(workload.model(), data_parallel_sharding_strategy=strategy)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.001), [ddp])
        ((inputs, targets),) = workload.microbatches(0, rank, 1)
        ddp(inputs, targets).backward()
        finalize_model_grads([ddp])
        assert optimizer.step()[0]
        del inputs, targets
        held[strategy] = (held_between_steps(ddp, before) - optimizer.scratch.nbytes) / workload.numel()
        del ddp, optimizer
        gc.collect()
    passing = workload.passing_numel(world) / workload.numel()
    assert held["optim"] == pytest.approx(4 + 4 + 8 / 4, rel=0.01)
    assert held["optim_grads_params"] == pytest.approx(16 / 4 + 4 * passing, rel=0.01)
    assert held["optim_grads_params"] < 0.55 * held["optim"]

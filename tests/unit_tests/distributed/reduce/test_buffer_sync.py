"""broadcast_buffers=True: buffers of modules are the first data rank's before a forward, as with torch's DDP."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from core import parallel_state
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    LayoutMismatch,
    finalize_model_grads,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import make_net, wrap

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Normed(nn.Module):
    """BatchNorms in 64 and 32 bits with their counts, and buffers of other dtypes that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.norm = nn.Linear(3, 5).double(), nn.BatchNorm1d(5).double()
        self.second, self.single = nn.Linear(5, 2).double(), nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("mask", torch.ones(2, dtype=torch.float64), persistent=False)
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = x[0] > 0  # another tensor, as modules do
        hidden = self.second(torch.tanh(self.norm(self.first(x)))) * self.mask
        return self.single(hidden.float()).double()


def inputs_of(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64) * (1 + rank) + rank


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def same_buffers(ours: nn.Module, theirs: nn.Module) -> None:
    for name, want in buffers_of(theirs).items():
        torch.testing.assert_close(buffers_of(ours)[name], want, atol=1e-12, rtol=1e-6, msg=f"{name} differs")


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.in_suite(2)
def test_batchnorm_evaluates_as_with_torch_ddp(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    model = Normed()
    theirs = TorchDDP(copy.deepcopy(model))
    ours = wrap(
        copy.deepcopy(model), broadcast_buffers=True, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True
    )
    for step in range(3):
        ours.zero_grad_buffer()
        theirs.zero_grad()
        for part in range(3):
            number = 3 * step + part
            for each in (ours, theirs):
                if part == 1:
                    with each.no_sync():
                        each(inputs_of(rank, number)).square().sum().backward()
                else:
                    each(inputs_of(rank, number)).square().sum().backward()
            if rank == 0 or strategy in ("no_shard", "optim"):
                same_buffers(ours.module, theirs.module)
        finalize_model_grads([ours])
    found = []
    for each in (ours.eval(), theirs.eval()):
        with torch.no_grad():
            each(inputs_of(0, 99))
            found.append(each(inputs_of(0, 100)))
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-6)
    same_buffers(ours.module, theirs.module)
    everyone = [torch.empty_like(found[0]) for _ in range(world)]
    dist.all_gather(everyone, found[0])
    assert torch.equal(everyone[0], everyone[1])
    assert (ours.module.norm.running_mean - model.norm.running_mean).abs().max() > 0.05


@ranks(2)
def test_buffers_stay_each_ranks_own_where_no_one_asks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ours = wrap(Normed())
    for number in range(3):
        ours(inputs_of(rank, number)).sum().backward()
    means = [torch.empty(5, dtype=torch.float64) for _ in range(world)]
    dist.all_gather(means, ours.module.norm.running_mean)
    assert not torch.equal(*means)
    assert ours.engine.buffer_sync is None
    assert wrap(make_net(), broadcast_buffers=True).engine.buffer_sync is None  # there are none


@ranks(2)
def test_a_buffer_that_a_graph_has_saved_may_be_broadcast_before_its_backward(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ours = wrap(Normed(), broadcast_buffers=True)
    first = ours(inputs_of(rank, 0)).square().sum()
    second = ours(inputs_of(rank, 1)).square().sum()
    (first + second).backward()
    finalize_model_grads([ours])


@ranks(2)
def test_other_buffers_on_one_rank_are_refused_by_name_on_all(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = Normed()
    if rank == 1:
        model.register_buffer("mask", torch.ones(4))
    with pytest.raises(LayoutMismatch, match=r"rank 1 has buffer 'mask' of \[4\].*rank 0 has buffer 'mask' of \[2\]"):
        wrap(model, broadcast_buffers=True)


@ranks(4)
def test_buffers_go_over_the_data_group_alone(rank: int, world: int) -> None:
    """Over tensor-parallel ranks a split layer's buffers differ."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = nn.Linear(2, 2).double()
    model.register_buffer("own", torch.tensor([10.0 * rank, rank], dtype=torch.float32))
    ours = wrap(model, broadcast_buffers=True)
    first = rank % 2  # of the data group {0, 2} or {1, 3}
    assert ours.module.own.tolist() == [10.0 * first, first]
    ours.module.own.add_(rank)
    ours(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert ours.module.own.tolist() == [11.0 * first, 2.0 * first]


@ranks(2)
def test_buffers_of_experts_stay_with_their_experts(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model: Any = nn.ModuleDict({"dense": nn.BatchNorm1d(2), "expert": nn.BatchNorm1d(2)})
    for param in model["expert"].parameters():
        param.allreduce = False
    model["expert"].register_module("below", nn.BatchNorm1d(2, affine=False))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.fill_(rank + 1.0)
    ours = wrap(nn.Sequential(model["dense"], model["expert"]), broadcast_buffers=True, initial_weights="ignore")
    assert ours.module[0].running_mean.tolist() == [1.0, 1.0]
    assert ours.module[1].running_mean.tolist() == [rank + 1.0] * 2
    assert ours.module[1].below.running_mean.tolist() == [rank + 1.0] * 2


@ranks(2)
def test_batch_norm_whose_statistics_stay_each_ranks_own_is_warned_of_once(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()

    def said(module: nn.Module, broadcast: bool | None = None) -> list[str]:
        config = DistributedDataParallelConfig(broadcast_buffers=broadcast)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            DistributedDataParallel(None, config, module)
        assert {each.filename for each in caught} <= {__file__}  # the user's line
        return [str(each.message) for each in caught]

    def new() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3))

    found = said(new())
    assert len(found) == (rank == 0)  # by the first rank for all
    if found:
        assert found[0].startswith("2 layers of BatchNorm, the first '1', keep statistics of each rank's own data")
    assert said(new(), True) == said(new(), False) == []
    assert said(nn.SyncBatchNorm.convert_sync_batchnorm(new())) == []
    assert said(nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3, track_running_stats=False))) == []
    frozen = new()
    frozen[1].eval()
    frozen[3].eval()
    assert said(frozen) == []

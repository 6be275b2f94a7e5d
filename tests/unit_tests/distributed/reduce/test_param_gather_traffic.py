"""Updated parameters are gathered once a bucket and step, experts' too, also while the next bucket is stepped."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap


class WithExperts(nn.Module):
    """Two dense layers around a matrix that is an expert's."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(5, 9, dtype=dtype), nn.Linear(9, 3, dtype=dtype)
        self.expert = nn.Linear(9, 9, dtype=dtype)
        for param in self.expert.parameters():
            param.allreduce = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.expert(torch.tanh(self.first(x)))))


def build(bucketwise: bool, overlap: bool, strategy: str, algorithm: str, dtype: torch.dtype) -> tuple[Any, Any]:
    ddp = wrap(
        WithExperts(dtype),
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=True,
        overlap_param_gather=overlap,
        bucket_size=40,
        keep_params_whole=algorithm == "muon",
    )
    config = OptimizerConfig(
        optimizer=algorithm,
        lr=0.02,
        clip_grad=1.0,
        bf16=dtype is torch.bfloat16,
        overlap_param_gather_with_optimizer_step=bucketwise,
    )
    return ddp, get_megatron_optimizer(config, [ddp])


def train(ddp: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, y = (torch.randn(4, size, generator=generator).to(ddp.module.first.weight.dtype) for size in (5, 3))
    optimizer.zero_grad()
    F.mse_loss(ddp(x), y).backward()
    finalize_model_grads([ddp])
    assert optimizer.step()[0]


def buckets_of(ddp: DistributedDataParallel) -> list[Any]:
    return [bucket for buffer in (*ddp.grad_buffers, *ddp.expert_parallel_buffers) for bucket in buffer.buckets]


@ranks(2, 4)
@pytest.mark.parametrize(
    ("strategy", "algorithm", "dtype"),
    [
        ("optim", "adam", torch.float32),
        ("optim", "muon", torch.float32),
        ("optim", "adam", torch.bfloat16),
        ("optim_grads", "adam", torch.float32),
    ],
)
@pytest.mark.in_suite()
def test_bucket_by_bucket_gives_the_same_bits_with_one_gather_a_bucket_and_step(
    rank: int, world: int, strategy: str, algorithm: str, dtype: torch.dtype
) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    models = [build(bucketwise, False, strategy, algorithm, dtype) for bucketwise in (False, True)]
    gathered = [
        bucket for bucket in buckets_of(models[0][0]) if torch.distributed.get_world_size(bucket.groups.shard) > 1
    ]
    assert len(gathered) >= 2 and bool(models[0][0].expert_parallel_buffers)
    assert world == 2 or any(contract.is_expert for bucket in gathered for contract in bucket.contracts)
    start = [param.detach().clone() for param in models[0][0].module.parameters()]
    for step in range(4):
        for ddp, optimizer in models:
            traffic = ddp.param_sync.collectives.traffic
            before = traffic.collectives
            train(ddp, optimizer, rank, step)
            assert traffic.collectives - before == len(gathered), "exactly one gather a bucket and step"
            assert all(gather.waited for gather in ddp.param_sync.gathers.values())
    plain, bucketwise = (list(ddp.module.parameters()) for ddp, _ in models)
    for one, other, before in zip(plain, bucketwise, start, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, before), "nothing has moved"


@ranks(2)
@pytest.mark.parametrize(("bucketwise", "overlap"), [(True, False), (False, True)])
def test_a_bucket_sets_out_before_the_next_one_is_stepped(
    rank: int, world: int, bucketwise: bool, overlap: bool
) -> None:
    parallel_state.initialize_model_parallel()
    ddp, optimizer = build(bucketwise, overlap, "optim", "adam", torch.float32)
    train(ddp, optimizer, rank, 0)
    events: list[Any] = []
    step, start, finish = optimizer.optimizer.step, ddp.param_sync.start_bucket, ddp.finish_param_sync
    place = {id(bucket): index for index, bucket in enumerate(ddp.param_sync.buckets)}
    of_master = {
        id(segment.master): place[id(masters.bucket)] for masters in optimizer.masters for segment in masters.segments
    }

    def logged_step() -> None:
        events.append(("step", {of_master[id(p)] for group in optimizer.param_groups for p in group["params"]}))
        step()

    def logged_start(bucket: Any) -> None:
        events.append(("gather", place[id(bucket)]))
        start(bucket)

    def logged_finish() -> None:
        events.append(("wait", None))
        finish()

    optimizer.optimizer.step = logged_step
    ddp.param_sync.start_bucket, ddp.finish_param_sync = logged_start, logged_finish
    train(ddp, optimizer, rank, 1)
    owned = set(of_master.values())
    expected: list[Any] = []
    for index in range(len(place)):
        expected += [("step", {index})] * (index in owned) + [("gather", index)]
    assert len(place) > 2
    assert events == [*expected, ("wait", None)]
    # The forward's order: the first bucket to come back holds what the forward reads first.
    assert any(param is ddp.module.first.weight for param in ddp.param_sync.buckets[0].params)


@ranks(1)
def test_without_sharding_there_is_nothing_to_gather_and_the_option_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    with pytest.raises(ValueError, match="is not sharded, so it gathers nothing"):
        build(True, False, "no_shard", "adam", torch.float32)

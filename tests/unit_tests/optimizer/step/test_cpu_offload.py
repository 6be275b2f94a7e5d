"""A part of the optimizer's state on the host: which buckets, and that a model on the CPU trains as without it.

Bits next to a device are tested in tests/unit_tests/second_device.
"""

from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.groups.offload import buckets_on_host
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, wrap


def offload(fraction: float, **more: Any) -> dict[str, Any]:
    return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction, **more}


def chosen(numels: list[int], fraction: float, muon: tuple[int, ...] = ()) -> list[int]:
    buckets = [(numel, [nn.Parameter(torch.tensor(float(n)))]) for n, numel in enumerate(numels)]
    config = OptimizerConfig(**offload(fraction))
    return sorted(
        buckets_on_host(config, buckets, lambda param: {"optimizer": "muon" if int(param) in muon else "adam"})
    )


def test_the_first_buckets_in_launch_order_go_to_the_host() -> None:
    assert chosen([10, 40, 30, 20], 0.0) == [] and chosen([], 0.5) == []
    assert chosen([10, 40, 30, 20], 1.0) == [0, 1, 2, 3]
    assert chosen([10, 40, 30, 20], 0.5) == [0, 1]  # 50 of 100
    assert chosen([10, 40, 30, 20], 0.35) == [0, 1]  # the middle of the second lies within 35
    assert chosen([100], 0.1) == [0] and chosen([10, 90], 0.01) == [0]  # one at least
    assert chosen([10, 40, 30, 20], 0.5, muon=(0, 1)) == [2]  # of the rest, half
    with pytest.warns(UserWarning, match="nothing is offloaded: each bucket has matrices of Muon.*smaller buckets"):
        assert chosen([10, 40], 0.5, muon=(0, 1)) == []


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_on_a_cpu_nothing_moves_and_every_bit_is_that_without_the_option(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    nets = []
    for settings in ({}, offload(0.6, overlap_cpu_optimizer_d2h_h2d=True), offload(1.0)):
        model = make_net(torch.bfloat16, width=61)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=60)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05, bf16=True, **settings), [ddp])
        for microbatch in range(2):
            optimizer.zero_grad()
            loss_of(ddp, rank, microbatch).backward()
            finalize_model_grads([ddp])
            assert optimizer.step()[0]
        assert not any(masters.is_apart for masters in optimizer.masters)
        nets.append(model)
    for other in nets[1:]:
        for (name, want), got in zip(nets[0].named_parameters(), other.parameters(), strict=True):
            assert torch.equal(got, want), name
    start = make_net(torch.bfloat16, width=61)
    assert (nets[0].second.weight - start.second.weight).norm() > 1e-2, "nothing has moved"


def test_what_cannot_be_offloaded_is_refused() -> None:
    for bad, why in (
        ({"optimizer_offload_fraction": 0.5}, "optimizer_cpu_offload is False"),
        (offload(1.5), r"of at least 0 and at most 1"),
    ):
        with pytest.raises(ValueError, match=why):
            OptimizerConfig(**bad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@ranks(1)
@pytest.mark.parametrize("overlap", [True, False])
def test_on_a_gpu_the_state_is_pinned_on_the_host_and_the_numbers_are_those_of_the_gpu(
    rank: int, world: int, overlap: bool
) -> None:
    check_state_on_the_host(torch.device("cuda"), overlap)


def check_state_on_the_host(device: torch.device, overlap: bool) -> None:
    """Train with offloaded state next to a model on a device; the tests of the second device do so too."""
    parallel_state.initialize_model_parallel()
    trained = []
    for settings in ({}, offload(0.5, overlap_cpu_optimizer_d2h_h2d=overlap)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device)
        ddp = wrap(model, bucket_size=5000, overlap_grad_reduce=True)  # in several buckets
        config = OptimizerConfig(lr=0.01, optimizer_backend="foreach", **settings)
        optimizer: Any = get_megatron_optimizer(config, [ddp])
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(device)
            (ddp(x) - x).square().mean().backward()
            finalize_model_grads([ddp])
            optimizer.step()
        trained.append([param.detach().clone() for param in model.parameters()])
    apart = [masters for masters in optimizer.masters if masters.is_apart]
    assert 0 < len(apart) < len(optimizer.masters)
    for masters in apart:
        assert masters.kept.is_pinned() and masters.grad.is_pinned()
        assert all(optimizer.state[segment.master]["exp_avg"].is_cpu for segment in masters.segments)
    torch.manual_seed(0)
    start = list(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).parameters())
    for one, other, weight in zip(*trained, start, strict=True):
        moved = (one.cpu() - weight).norm()
        assert moved > 0.01 and (one - other).norm() < 1e-5 * moved

"""BatchNorm under the sharding plugins: what is saved is what every rank has evaluated, as with torch's DDP."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.booster import Booster
from core.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from tests.unit_tests.ranks import ranks


def new_net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def plugin_of(name: str, **options: Any) -> Any:
    if name == "ddp":
        return TorchDDPPlugin(**options)
    return (
        GeminiPlugin(precision="fp32", **options)
        if name == "gemini"
        else LowLevelZeroPlugin(int(name), "fp32", **options)
    )


def trained(name: str, rank: int, **options: Any) -> tuple[Booster, Any]:
    """Three steps of two microbatches, on data with another mean and width on each rank."""
    booster, net = Booster(plugin=plugin_of(name, **options)), new_net()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        x, y = torch.randn(8, 5) * (1 + rank) + 2 * rank, torch.randn(8, 3)
        booster.backward((model(x) - y).square().mean(), optimizer)
        optimizer.step()
    return booster, model


def evaluated(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        outputs: torch.Tensor = model(torch.linspace(-2, 2, 20).view(4, 5))
    return outputs


@ranks(2)
@pytest.mark.parametrize("name", ["1", "2", "gemini"])
def test_every_rank_evaluates_the_statistics_that_are_saved(rank: int, world: int, name: str, in_memory: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*BatchNorm")
        booster, model = trained(name, rank)
    booster.save_model(model, in_memory / "model.pt")
    outputs = evaluated(model)
    of_all = [torch.empty_like(outputs) for _ in range(world)]
    dist.all_gather(of_all, outputs)
    resumed = new_net()
    resumed.load_state_dict(torch.load(in_memory / "model.pt"))
    torch_ddp = evaluated(trained("ddp", rank)[1])
    for other in of_all:
        assert torch.equal(other, outputs)
        torch.testing.assert_close(other, torch_ddp, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(evaluated(resumed), outputs, atol=1e-6, rtol=1e-6)
    assert (outputs - evaluated(new_net())).abs().max() > 0.1


@ranks(2)
def test_broadcast_buffers_false_keeps_each_ranks_own(rank: int, world: int) -> None:
    for name in ("1", "gemini"):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*BatchNorm")
            _, model = trained(name, rank, broadcast_buffers=False)
        outputs = evaluated(model)
        of_all = [torch.empty_like(outputs) for _ in range(world)]
        dist.all_gather(of_all, outputs)
        assert (of_all[0] - of_all[1]).abs().max() > 0.1


@ranks(2)
def test_constants_that_are_not_saved_need_no_other_rank(rank: int, world: int) -> None:
    """One rank may evaluate a model whose only buffers are such as rotary frequencies."""

    class Rotary(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("frequencies", torch.ones(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.frequencies)

    booster, net = Booster(plugin=LowLevelZeroPlugin(1, "fp32")), Rotary()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    booster.backward(model(torch.ones(2, 3)).sum(), optimizer)
    optimizer.step()
    if rank == 0:
        with torch.no_grad():
            model.eval()(torch.ones(2, 3))
    dist.barrier()

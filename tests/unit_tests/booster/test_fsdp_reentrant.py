"""A layer that is used several times under TorchFSDPPlugin, with checkpoints: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from core.booster import Booster
from core.booster.plugin import TorchFSDPPlugin
from tests.unit_tests.ranks import ranks

LR = 0.5


class Repeated(nn.Module):
    """use: how the middle layer is used between the ends."""

    def __init__(self, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.middle, self.last = (nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
        self.use = use

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.use(self.middle, self.first(rows)))


def reentrant(layer: nn.Module, hidden: Tensor) -> Tensor:
    return checkpoint(layer, hidden, use_reentrant=True).tanh()


def recomputed(layer: nn.Module, hidden: Tensor) -> Tensor:
    return checkpoint(layer, hidden, use_reentrant=False).tanh()


def seen(layer: nn.Module, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        shift = layer(hidden)
    return reentrant(layer, hidden) + shift


WRONG: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "twice": lambda layer, hidden: reentrant(layer, reentrant(layer, hidden)),
    "plainly behind it": lambda layer, hidden: layer(reentrant(layer, hidden)).tanh(),
}
RIGHT: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "once": reentrant,
    "without a gradient too": seen,
    "twice in one checkpoint": lambda layer, hidden: reentrant(nn.Sequential(layer, nn.Tanh(), layer), hidden),
    "twice without reentry": lambda layer, hidden: recomputed(layer, recomputed(layer, hidden)),
}


def rows_of(rank: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(30 + rank))


def boosted(use: Callable[[nn.Module, Tensor], Tensor], **options: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=TorchFSDPPlugin(auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **options))
    model = Repeated(use)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=LR))
    return booster, model, optimizer


@ranks(2)
@pytest.mark.parametrize("use", RIGHT)
@pytest.mark.in_suite(4)
def test_uses_that_fsdp_counts_train_as_one_process(rank: int, world: int, use: str) -> None:
    reference = Repeated(RIGHT[use])
    expected = torch.optim.SGD(reference.parameters(), lr=LR)
    booster, model, optimizer = boosted(RIGHT[use])
    for _ in range(2):
        booster.backward(model(rows_of(rank)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        torch.stack([reference(rows_of(number)).square().mean() for number in range(world)]).mean().backward()
        expected.step()
        expected.zero_grad()
    for param, wanted, first in zip(
        model.parameters(), reference.parameters(), Repeated(RIGHT[use]).parameters(), strict=True
    ):
        torch.testing.assert_close(param.full_tensor(), wanted, atol=1e-6, rtol=0)
        assert float((wanted - first).abs().max()) > 1e-3


@ranks(2)
@pytest.mark.parametrize("use", WRONG)
@pytest.mark.in_suite(2)
def test_a_layer_that_is_used_again_behind_a_reentrant_checkpoint_is_refused(rank: int, world: int, use: str) -> None:
    words = rf"rank {rank}: FSDP has left a gradient of 'middle.0.weight' unreduced.*use_reentrant=False"
    booster, model, optimizer = boosted(WRONG[use])
    with booster.no_sync(model, optimizer):
        booster.backward(model(rows_of(rank)).square().mean(), optimizer)
    booster.backward(model(rows_of(rank)).square().mean(), optimizer)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for act in (optimizer.step, lambda: optimizer.clip_grad_by_norm(1.0), lambda: optimizer.clip_grad_by_value(1.0)):
        with pytest.raises(RuntimeError, match=words):
            act()
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])

    precision = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    booster, model, optimizer = boosted(WRONG[use], mixed_precision=precision)
    booster.backward(model(rows_of(rank)).float().square().mean() * 1e-3, optimizer)
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()

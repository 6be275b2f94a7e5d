"""A limit that ranks pass by themselves is the same on all of them, or refused on all of them, with nothing changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from core.booster import Booster
from core.booster.plugin import LowLevelZeroPlugin, TorchFSDPPlugin
from core.booster.plugin.limit_agreement import check_limit
from core.interface.optimizer import check_max_norm
from tests.unit_tests.booster.booster_reference import mean_loss, new_model
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import batch

PLUGINS: dict[str, Any] = {
    "zero 1": lambda: LowLevelZeroPlugin(1, "fp32"),
    "zero 2": lambda: LowLevelZeroPlugin(2, "fp32"),
    "fsdp": TorchFSDPPlugin,
}
CALLS = {"max_norm": "clip_grad_by_norm", "clip_value": "clip_grad_by_value"}


@ranks(2, 3)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.in_suite()
def test_ranks_that_would_clip_differently_are_refused(rank: int, world: int, plugin: str, name: str) -> None:
    booster = Booster(plugin=PLUGINS[plugin]())
    model = new_model()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, targets = batch(rank, 0, torch.float32)
    booster.backward(mean_loss(model(inputs), targets), optimizer)
    before = [param.detach().clone() for param in model.parameters()]
    clip = getattr(optimizer, CALLS[name])
    odd = rank == world - 1
    with pytest.raises(ValueError, match=f"rank {world - 1} has {name} = 2.0; rank 0 has {name} = 1.0"):
        clip(2.0 if odd else 1.0)
    with pytest.raises(ValueError, match=f"{'' if odd else f'rank {world - 1} of .*failed.*'}{name} is 0.*positive"):
        clip(0 if odd else 1.0)
    clip(1e-3)  # alike: the step is made all the same
    optimizer.step()
    moved = max(float((now - old).abs().max()) for now, old in zip(local(model), map(whole, before), strict=True))
    assert 0 < moved <= 0.1 * 1e-3 * 1.001


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local(model: Any) -> list[torch.Tensor]:
    return [whole(param.detach()) for param in model.parameters()]


@ranks(2)
def test_no_limit_is_a_limit_like_any_other(rank: int, world: int) -> None:
    group = torch.distributed.group.WORLD
    check_limit("max_norm", math.inf, check_max_norm, [group])
    check_limit("max_norm", torch.tensor(2.0), check_max_norm, [group])
    with pytest.raises(ValueError, match="rank 1 has max_norm = inf; rank 0 has max_norm = 1.0"):
        check_limit("max_norm", math.inf if rank else 1.0, check_max_norm, [group])


@ranks(2)
@pytest.mark.parametrize("value", [10**400, torch.tensor(1j)], ids=["huge", "complex"])
def test_what_no_rank_can_send_leaves_no_rank_waiting(rank: int, world: int, value: Any) -> None:
    group = torch.distributed.group.WORLD
    with pytest.raises((ValueError, OverflowError, RuntimeError), match="rank 0 of .* failed" if rank else None):
        check_limit("max_norm", 1.0 if rank else value, check_max_norm, [group])
    check_limit("max_norm", 1.0, check_max_norm, [group])  # all are at the same collective

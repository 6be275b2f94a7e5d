"""LoRA with an optimizer that was made before the adapters: it trains them, or is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from core.booster import Booster
from core.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from tests.unit_tests.booster.booster_reference import batch, full_weights, mean_loss, new_model, new_optimizer
from tests.unit_tests.ranks import ranks

PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(precision="fp32"),
}


def adapted(booster: Booster, model: nn.Module, **options: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    return booster.enable_lora(model, lora_config=peft.LoraConfig(r=2, init_lora_weights=False, **options))


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_an_optimizer_made_before_the_adapters_trains_them_in_the_groups_of_their_weights(
    rank: int, world: int, plugin: str
) -> None:
    booster = Booster(plugin=PLUGINS[plugin]())
    plain = new_model()
    optimizer: Any = new_optimizer(plain)
    groups = optimizer.param_groups
    model = adapted(booster, plain, target_modules=["first"], modules_to_save=["third"])
    reference = copy.deepcopy(model).double()
    named = dict(reference.named_parameters())
    trained = {name for name, param in named.items() if param.requires_grad}
    assert len(trained) == 4 and any("modules_to_save" in name for name in trained)
    weights = [named[name] for name in trained if not name.endswith("bias")]
    others = [named[name] for name in trained if name.endswith("bias")]
    sgd = torch.optim.SGD(
        [{**bare(groups[0]), "params": weights}, {**bare(groups[1]), "params": others}], lr=1.0, momentum=0.5
    )
    start = {name: param.detach().clone() for name, param in named.items()}

    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(3):
        sgd.zero_grad()
        for r in range(world):
            inputs, targets = batch(r, step)
            (mean_loss(reference(inputs), targets) / world).backward()
        sgd.step()
        inputs, targets = batch(rank, step, torch.float32)
        optimizer.zero_grad()
        booster.backward(mean_loss(model(inputs), targets), optimizer)
        optimizer.step()
    found = full_weights(model)
    for name, want in named.items():
        torch.testing.assert_close(found[name].double(), want.detach(), rtol=0, atol=1e-5)
        moved = (want.detach() - start[name]).abs().max()
        assert moved > 1e-3 if name in trained else moved == 0, name


def bare(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in ("lr", "weight_decay", "momentum")}


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_an_optimizer_that_trains_nothing_is_refused_on_all_ranks(rank: int, world: int, plugin: str) -> None:
    booster = Booster(plugin=PLUGINS[plugin]())
    plain = new_model()
    optimizer = torch.optim.SGD([plain.second.weight], lr=0.1)
    model = adapted(booster, plain, target_modules=["first"])
    refusal = r"the optimizer's 1 parameters are frozen in the model, .*'base_model.model.first.lora_A"
    with (
        pytest.warns(UserWarning, match="adapts a weight that is not in the optimizer"),
        pytest.raises(ValueError, match=refusal),
    ):
        booster.boost(model, optimizer)
    frozen = new_model()
    if rank == 1:
        frozen.requires_grad_(False)
    with pytest.raises((ValueError, RuntimeError), match=r"the optimizer's \d+ parameters are frozen in the model"):
        booster.boost(frozen, new_optimizer(frozen))

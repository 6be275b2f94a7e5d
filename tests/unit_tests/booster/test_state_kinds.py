"""State that is no value per element though its size says so: it comes back from a file as it was made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.algorithms.layerwise import CAME
from tests.unit_tests.booster.booster_reference import full_weights
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap


class Shapes(nn.Module):
    """Parameters of no dimension, of one row and of one column, next to others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, 6))
        self.column = nn.Parameter(torch.randn(6, 1))
        self.one = nn.Parameter(torch.randn(1))
        self.matrix = nn.Parameter(torch.randn(6, 5))
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x * self.row) @ self.matrix * self.scale + self.column.sum() * self.one) + self.shift


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64).to(next(model.parameters()).dtype)
    return (model(x) - 2).square().mean()


def transformers_adafactor(params: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    made: torch.optim.Optimizer = Adafactor(params, lr=0.02, scale_parameter=False, relative_step=False)
    return made


MADE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.02),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.02, lambd=0.1, t0=1.0),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02, amsgrad=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02, d=100.0),
    "transformers' Adafactor": transformers_adafactor,
    "CAME": lambda params: CAME(params, lr=0.02),
}


def on_one_process(make: Callable[[Any], torch.optim.Optimizer], world: int, steps: int) -> tuple[nn.Module, Any]:
    model = Shapes().double()
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([loss_of(model, rank, step) for rank in range(world)]).mean().backward()
        optimizer.step()
    return model, optimizer


def assert_equal_to(ours: dict[str, torch.Tensor], reference: nn.Module) -> None:
    start = dict(Shapes().named_parameters())
    for name, want in reference.named_parameters():
        torch.testing.assert_close(ours[name].double(), want, atol=3e-6, rtol=3e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert (want - start[name].double()).abs().max() > 1e-3, name


@ranks(2)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("kind", ["stage 1", "stage 2", "gemini"])
@pytest.mark.in_suite()
def test_training_goes_on_from_a_file(rank: int, world: int, name: str, kind: str, in_memory: Path) -> None:
    """From a file of the Booster, and from a state dict; both hold the shapes that plain torch makes."""

    def boosted() -> tuple[Booster, Any, Any]:
        plugin = GeminiPlugin(precision="fp32") if kind == "gemini" else LowLevelZeroPlugin(int(kind[-1]), "fp32")
        booster, net = Booster(plugin=plugin), Shapes()
        model, optimizer, *_ = booster.boost(net, MADE[name](net.parameters()))
        return booster, model, optimizer

    def train(booster: Booster, model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            booster.backward(loss_of(model, rank, step), optimizer)
            optimizer.step()

    plain, sgd = on_one_process(MADE[name], world, 5)
    booster, model, optimizer = boosted()
    train(booster, model, optimizer, range(3))
    booster.save_model(model, in_memory / "model.pt")
    booster.save_optimizer(optimizer, in_memory / "optimizer.pt")
    state = copy.deepcopy(optimizer.state_dict())
    for number, shaped in sgd.state_dict()["state"].items():
        for key, value in shaped.items():
            got = state["state"][number][key]
            assert not isinstance(value, torch.Tensor) or got.shape == value.shape, (number, key)
    for way in ("file", "state dict"):
        booster, model, optimizer = boosted()
        booster.load_model(model, in_memory / "model.pt")
        if way == "file":
            booster.load_optimizer(optimizer, in_memory / "optimizer.pt")
        else:
            optimizer.load_state_dict(state)
        train(booster, model, optimizer, range(3, 5))
        assert_equal_to(full_weights(model), plain)


@ranks(2)
@pytest.mark.parametrize("name", ["NAdam", "ASGD", "came", "Adafactor"])
def test_training_goes_on_from_a_sharded_state_dict(rank: int, world: int, name: str) -> None:
    """Also from the state of replicas, which covers more than a shard needs."""
    parallel_state.initialize_model_parallel()
    options = {"d": 100.0} if name == "Adafactor" else {"lambd": 0.1, "t0": 1.0} if name == "ASGD" else {}
    config = OptimizerConfig(optimizer=name, lr=0.02, weight_decay=0.0, clip_grad=0.0, optimizer_kwargs=options)

    def made(strategy: str) -> tuple[Any, Any]:
        whole: Any = "all" if name in ("came", "Adafactor") else False
        ddp = wrap(Shapes(), data_parallel_sharding_strategy=strategy, keep_params_whole=whole)
        return ddp, get_megatron_optimizer(config, [ddp])

    def train(ddp: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            finalize_model_grads([ddp])
            assert optimizer.step()[0]

    plain, _ = on_one_process({**MADE, "came": MADE["CAME"]}[name], world, 5)
    for before, after in (("optim", "optim"), ("no_shard", "optim_grads"), ("no_shard", "no_shard")):
        ddp, optimizer = made(before)
        train(ddp, optimizer, range(3))
        weights, state = copy.deepcopy(ddp.state_dict()), copy.deepcopy(optimizer.state_dict())
        ddp, optimizer = made(after)
        ddp.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(ddp, optimizer, range(3, 5))
        assert_equal_to({key: value.detach() for key, value in ddp.module.named_parameters()}, plain)

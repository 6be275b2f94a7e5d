"""A schedule under gradient accumulation moves with updates of the parameters, and not with steps that overflowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.booster import Booster
from core.booster.mixed_precision.loss_scaled_optimizer import TorchAMPOptimizer
from core.booster.plugin import LowLevelZeroPlugin
from core.gradient_accumulation import GradAccumLrSchedulerByStep, GradAccumOptimizer, accumulate_gradient
from core.optimizer import ChainedOptimizer, OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer
from core.optimizer.loss_scaler import DynamicLossScaler
from tests.unit_tests.gradient_accumulation.test_gradient_accumulation import halving
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

INF, NAN = float("inf"), float("nan")
CYCLES = [[1.0, INF], [NAN, 1.0], [1.0, 1.0], [1.0, 1.0]]  # factors of the loss; the first two cycles overflow


def rates_of(model: nn.Module, optimizer: Any, scheduler: Any, groups: Any, *, alone: bool, **step: Any) -> list[float]:
    """The learning rate after each of CYCLES. alone: wrappers that share no state."""
    if alone:
        optimizer = GradAccumOptimizer(optimizer, 2, model)
        scheduler = GradAccumLrSchedulerByStep(scheduler, 2)
    else:
        optimizer, _, _, scheduler = accumulate_gradient(model, optimizer, [], 2, lr_scheduler=scheduler)
    rates = []
    for cycle in CYCLES:
        for factor in cycle:
            optimizer.zero_grad()
            optimizer.backward(model(torch.ones(1, 2)).float().sum() * factor)
            optimizer.step()
            scheduler.step(**step)
        rates.append(groups[0]["lr"])
    return rates


WANTED = [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("alone", [False, True])
def test_with_a_loss_scale_around_a_torch_optimizer(alone: bool) -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = TorchAMPOptimizer(inner, DynamicLossScaler(initial_scale=4.0, hysteresis=1))
    assert rates_of(model, optimizer, halving(inner), inner.param_groups, alone=alone) == WANTED
    assert optimizer.scaler.value == 1.0, "both overflows were seen"


@ranks(1)
@pytest.mark.parametrize("alone", [False, True])
def test_with_a_boosted_optimizer(rank: int, world: int, alone: bool) -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = halving(inner)
    plugin = LowLevelZeroPlugin(precision="fp16", initial_scale=4.0, hysteresis=1)
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, inner)
    assert rates_of(model, optimizer, scheduler, inner.param_groups, alone=alone) == WANTED


def make_ours(chained: bool) -> tuple[nn.Module, Any]:
    parallel_state.initialize_model_parallel()
    model = nn.Linear(2, 1)
    ddp = wrap(model)
    config = OptimizerConfig(optimizer="sgd", lr=1.0, min_lr=0.0, weight_decay=0.0, loss_scale=1.0)
    optimizer = get_megatron_optimizer(config, [ddp])
    return ddp, ChainedOptimizer([optimizer]) if chained else optimizer


@ranks(1)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("chained", [False, True])
def test_with_our_optimizer_under_torchs_schedule(rank: int, world: int, alone: bool, chained: bool) -> None:
    ddp, optimizer = make_ours(chained)
    torchs = optimizer.chained_optimizers[0].optimizer if chained else optimizer.optimizer
    assert rates_of(ddp, optimizer, halving(torchs), optimizer.param_groups, alone=alone) == WANTED
    assert optimizer.steps_skipped == 2


@ranks(1)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("chained", [False, True])
def test_with_our_optimizer_under_megatrons_schedule(rank: int, world: int, alone: bool, chained: bool) -> None:
    ddp, optimizer = make_ours(chained)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1.0, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=4,
        lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=0, wd_incr_style="constant",
    )  # fmt: skip
    rates = rates_of(ddp, optimizer, scheduler, optimizer.param_groups, alone=alone, increment=1)
    assert rates == [1.0, 1.0, 0.75, 0.5]

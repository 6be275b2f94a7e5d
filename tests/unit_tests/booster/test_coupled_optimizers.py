"""Optimizers with one number for several parameters, as Prodigy has: one call with all of them, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.booster.booster_reference import full_weights, new_model
from tests.unit_tests.booster.test_low_level_zero import TINY_BUCKETS
from tests.unit_tests.booster.test_low_level_zero_training import assert_equal_training, both_ways, grouped, net_loss
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import make_net, train, wrap

STEPS = 4


class OneRate(torch.optim.Optimizer):
    """One step size for all parameters of all groups, from the sum of the squares of all their gradients so far.

    `calls` holds the number of parameters that each call of `step` has seen with a gradient.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.5, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "squares": 1.0})
        self.calls: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        pairs = [(param, group) for group in self.param_groups for param in group["params"] if param.grad is not None]
        squares = self.param_groups[0]["squares"] + float(sum(param.grad.double().square().sum() for param, _ in pairs))
        self.calls.append(len(pairs))
        for group in self.param_groups:
            group["squares"] = squares
        for param, group in pairs:
            mean = self.state[param].setdefault("mean", torch.zeros_like(param))
            mean.mul_(group["momentum"]).add_(param.grad)
            param.sub_(mean, alpha=group["lr"] / squares**0.5)


class OneRateOfWhole(OneRate):
    """Says that it looks at whole parameters, and not whether at several."""

    needs_shapes = True


def plugin_of(name: str, world: int, precision: str, **options: Any) -> Any:
    if name == "gemini replicated":
        chunks = {world: {"chunk_size": 60, "keep_gathered": True}}
        return GeminiPlugin(chunk_config_dict=chunks, precision=precision, **options)
    if name == "gemini":
        return GeminiPlugin(chunk_config_dict={world: {"chunk_size": 60}}, precision=precision, **options)
    instances = world if name.endswith("alone") else 1
    stage = int(name.split()[1])
    options |= {"reduce_bucket_size_in_m": TINY_BUCKETS, "extra_dp_size": instances}
    return LowLevelZeroPlugin(stage, precision, **options)


@ranks(2)
@pytest.mark.parametrize("name", ["gemini replicated", "stage 1 alone", "stage 2 alone"])
@pytest.mark.parametrize("cls", [OneRate, OneRateOfWhole])
@pytest.mark.in_suite()
def test_one_call_a_step_has_every_parameter_and_trains_as_one_process(
    rank: int, world: int, name: str, cls: type[OneRate]
) -> None:
    start = new_model()
    made: list[Any] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        made.append(grouped(cls, lr=0.3)(model))
        return made[-1]

    booster = Booster(plugin=plugin_of(name, world, "fp32"))
    model, reference = both_ways(start, make, net_loss, rank, world, booster, steps=STEPS)
    assert_equal_training(model, reference, start)
    assert made[1].calls == made[0].calls == [7] * STEPS


@ranks(2)
@pytest.mark.parametrize("name", ["gemini replicated", "stage 2 alone"])
@pytest.mark.parametrize("master_weights", [True, False])
def test_16_bit_weights_are_stepped_in_one_call_too(rank: int, world: int, name: str, master_weights: bool) -> None:
    """Segments that go through scratch memory, and more of them than one wave of it has room for."""
    start = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))).bfloat16().float()
    made: list[Any] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        made.append(grouped(OneRate, lr=0.3)(model))
        return made[-1]

    def loss(model: nn.Module, of_rank: int, step: int) -> torch.Tensor:
        torch.manual_seed(10 * of_rank + step)
        x = torch.randn(8, 5, dtype=torch.bfloat16)
        return (model(x.to(next(model.parameters()).dtype)).float() - 2).square().mean()

    plugin = plugin_of(name, world, "bf16", master_weights=master_weights)
    model, reference = both_ways(start, make, loss, rank, world, Booster(plugin=plugin), steps=STEPS)
    assert made[1].calls == made[0].calls == [8] * STEPS
    for ours, theirs in zip(made[1].param_groups, made[0].param_groups, strict=True):
        assert theirs["squares"] > 2
        assert ours["squares"] == pytest.approx(theirs["squares"], rel=3e-2)
    weights = full_weights(model)
    for key, want in reference.named_parameters():
        torch.testing.assert_close(weights[key].double(), want, atol=2e-2, rtol=2e-2)


@ranks(2)
def test_what_other_ranks_hold_a_part_of_is_refused_by_name(rank: int, world: int) -> None:
    for cls in (OneRate, OneRateOfWhole):
        text = rf"{cls.__name__} does not say .*{cls.__name__}.needs_shapes = False.*couples_parameters = False"
        for name in ("stage 1", "stage 2", "gemini"):
            model = new_model()
            with pytest.raises(ValueError, match=text):
                Booster(plugin=plugin_of(name, world, "fp32")).boost(model, grouped(cls, lr=0.3)(model))
        parallel_state.initialize_model_parallel()
        for strategy in ("optim", "optim_grads_params"):
            ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy, keep_params_whole="all")
            with pytest.raises(ValueError, match=text):
                get_megatron_optimizer(OptimizerConfig(optimizer=cls, lr=0.3, weight_decay=0.0), [ddp])
        parallel_state.destroy_model_parallel()


@ranks(2)
def test_a_config_names_one_where_nothing_is_sharded(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), data_parallel_sharding_strategy="no_shard", bucket_size=50)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer=OneRate, lr=0.3, clip_grad=0.0), [ddp])
    train(ddp, optimizer, rank, *range(STEPS))
    assert optimizer.optimizer.calls == [7] * STEPS

"""Five steps with each plugin equal one process on the same global batch."""

import pytest
import torch

from core.booster import Booster
from core.booster.mixed_precision import FP16TorchMixedPrecision
from core.booster.plugin import DPPluginBase, GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from tests.unit_tests.booster.booster_reference import (
    BOUNDS,
    MAX_NORM,
    assert_same_training,
    full_weights,
    mean_loss,
    new_model,
    one_backward,
    train,
    trained_on_one_process,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import batch

PLUGINS = {"torch_ddp": TorchDDPPlugin, "torch_fsdp": TorchFSDPPlugin}


def new_plugin(name: str) -> DPPluginBase:
    if name == "torch_fsdp":
        return TorchFSDPPlugin(auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or wants(module))
    return PLUGINS[name]()


def wants(module: object) -> bool:
    return type(module).__name__ == "Linear"


def check(rank: int, world: int, plugin: str, precision: str, accumulate: int, clip: bool) -> None:
    # From 2**16 the first step would overflow and be skipped, as another test wants it.
    chosen = FP16TorchMixedPrecision(init_scale=2.0**10) if precision == "fp16" else precision
    booster = Booster(mixed_precision=chosen, plugin=new_plugin(plugin))
    model, optimizer, norms = train(booster, rank, accumulate, clip)
    reference, wanted = trained_on_one_process(world, accumulate, clip)
    assert_same_training(model, reference, BOUNDS[precision])
    if clip:
        assert norms == pytest.approx(wanted, rel=10 * BOUNDS[precision])
        assert min(wanted) > 1.1 * MAX_NORM, "clipping would change nothing"
    if precision == "fp16":
        assert not optimizer.found_inf and optimizer.scaler.value == 2.0**10


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.in_suite()
def test_five_steps_equal_one_process(rank: int, world: int, plugin: str) -> None:
    for precision, accumulate, clip in (("fp32", 1, False), ("fp32", 4, True), ("bf16", 4, True), ("fp16", 1, True)):
        check(rank, world, plugin, precision, accumulate, clip)


@pytest.mark.nightly
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("clip", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_five_steps_equal_one_process_in_all_combinations(
    rank: int, world: int, plugin: str, precision: str, accumulate: int, clip: bool
) -> None:
    check(rank, world, plugin, precision, accumulate, clip)


@ranks(2)
@pytest.mark.parametrize("plugin", [*PLUGINS, "low_level_zero"])
def test_an_fp16_gradient_of_a_loss_that_was_not_scaled_is_refused_on_all_ranks(
    rank: int, world: int, plugin: str
) -> None:
    booster = Booster(plugin=LowLevelZeroPlugin(initial_scale=2.0**4))
    if plugin != "low_level_zero":
        booster = Booster(mixed_precision=FP16TorchMixedPrecision(init_scale=2.0**4), plugin=new_plugin(plugin))
    net = torch.nn.Linear(3, 1)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    one_of_two = plugin in ("low_level_zero", "torch_ddp")  # FSDP keeps its parameters' hooks to itself
    for use, scaled in ((optimizer.step, False), (lambda: optimizer.clip_grad_by_norm(1.0), one_of_two)):
        optimizer.zero_grad()
        if scaled:
            with booster.no_sync(model, optimizer):
                booster.backward(model(torch.ones(2, 3)).float().mean(), optimizer)
        model(torch.ones(2, 3)).float().mean().backward()
        with pytest.raises(RuntimeError, match=r"booster\.backward\(loss, optimizer\) in place of loss\.backward"):
            use()
    optimizer.zero_grad()
    optimizer.scale_loss(model(torch.ones(2, 3)).float().mean()).backward()
    optimizer.step()
    assert not optimizer.found_inf
    optimizer.zero_grad()
    optimizer.step()  # without any gradient: nothing to refuse


@ranks(2)
@pytest.mark.parametrize("plugin", ["torch_ddp", "low_level_zero", "gemini"])
def test_adapters_that_are_injected_after_boost_are_refused_once_they_train(rank: int, world: int, plugin: str) -> None:
    """By peft, for an evaluation first (frozen), and trained later: no rank would reduce their gradients."""
    peft = pytest.importorskip("peft")
    made = {"gemini": GeminiPlugin(precision="fp32"), "low_level_zero": LowLevelZeroPlugin(precision="fp32")}
    booster = Booster(plugin=made.get(plugin) or new_plugin(plugin))
    net = new_model()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    one_backward(booster, model, optimizer, rank)
    optimizer.step()
    optimizer.zero_grad()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["second"], r=2), model.unwrap())
    for name, param in net.named_parameters():
        param.requires_grad_("lora" not in name)
    one_backward(booster, model, optimizer, rank)
    optimizer.step()
    optimizer.zero_grad()
    net.requires_grad_(True)
    with pytest.raises(RuntimeError, match="second.lora_A.default.weight"):
        one_backward(booster, model, optimizer, rank)
        optimizer.step()


@ranks(2)
@pytest.mark.parametrize("plugin", ["torch_ddp", "torch_fsdp", "low_level_zero"])
def test_nanogpts_switch_accumulates_under_every_plugin(rank: int, world: int, plugin: str) -> None:
    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32") if plugin == "low_level_zero" else new_plugin(plugin))
    net = new_model()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    plain = new_model()
    for microbatch in range(2):
        model.require_backward_grad_sync = microbatch == 1
        assert model.require_backward_grad_sync == (microbatch == 1)
        one_backward(booster, model, optimizer, rank, microbatch)
        if microbatch == 0:  # what this rank alone has computed, or nothing yet where full gradients are kept aside
            inputs, targets = batch(rank, 0, torch.float32)
            mean_loss(plain(inputs), targets).backward()
            local = net.third.weight.grad
            assert local is None if plugin == "torch_fsdp" else torch.allclose(local, plain.third.weight.grad)
    optimizer.step()
    expected = new_model()
    for number in range(world):
        for microbatch in range(2):
            inputs, targets = batch(number, microbatch, torch.float32)
            (mean_loss(expected(inputs), targets) / world).backward()
    for name, param in expected.named_parameters():
        assert param.grad.norm() > 1e-3, name
        torch.testing.assert_close(full_weights(model)[name].float(), param.detach() - 0.1 * param.grad)

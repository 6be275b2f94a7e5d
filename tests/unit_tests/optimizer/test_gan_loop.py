"""Loops in which gradients stay after the step: the one of DCGAN, and one that never zeroes. torch adds to them."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from core.distributed import SyncError, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS = 4


def generator() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def discriminator() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(5, 7), nn.LeakyReLU(0.2), nn.Linear(7, 1)).double()


def draw(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(real, noise): other ones on every rank and in every step."""
    seeded = torch.Generator().manual_seed(100 * rank + step)
    real = torch.randn(4, 5, generator=seeded, dtype=torch.float64) + 1
    return real, torch.randn(4, 3, generator=seeded, dtype=torch.float64)


def judge(scores: torch.Tensor, label: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


def gan_reference(world: int, make_optimizer: Any) -> dict[str, torch.Tensor]:
    """torch's DCGAN loop on one process, over the batch of all ranks."""
    net_d, net_g = discriminator(), generator()
    optimizer_d, optimizer_g = make_optimizer(net_d.parameters()), make_optimizer(net_g.parameters())
    for step in range(STEPS):
        real, noise = (torch.cat(parts) for parts in zip(*(draw(r, step) for r in range(world)), strict=True))
        net_d.zero_grad()
        judge(net_d(real), 1.0).backward()
        fake = net_g(noise)
        judge(net_d(fake.detach()), 0.0).backward()
        optimizer_d.step()
        net_g.zero_grad()
        judge(net_d(fake), 1.0).backward()  # leaves gradients in the discriminator
        optimizer_g.step()
    return {**named("d", net_d), **named("g", net_g)}


def named(prefix: str, model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": param.detach().clone() for name, param in model.named_parameters()}


def assert_trained_alike(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    start = {**named("d", discriminator()), **named("g", generator())}
    for name, want in expected.items():
        torch.testing.assert_close(ours[name].double(), want, atol=bound, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert (want - start[name]).abs().max() > 1e4 * bound, f"{name} has not moved"


def adam(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05, betas=(0.5, 0.999), eps=1e-3)


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.5)


@ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_dcgan_loop_trains_as_plain_torch(rank: int, world: int, overlap: bool) -> None:
    parallel_state.initialize_model_parallel()
    expected = gan_reference(world, sgd)
    for strategy in STRATEGIES:
        options = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": overlap, "bucket_size": 20}
        net_d, net_g = wrap(discriminator(), **options), wrap(generator(), **options)
        config = OptimizerConfig(optimizer="sgd", lr=0.3, sgd_momentum=0.5, weight_decay=0.0, clip_grad=0.0)
        optimizer_d, optimizer_g = (
            get_megatron_optimizer(config, [net], config_overrides={}) for net in (net_d, net_g)
        )
        for step in range(STEPS):
            real, noise = draw(rank, step)
            net_d.zero_grad()
            judge(net_d(real), 1.0).backward()
            fake = net_g(noise)
            judge(net_d(fake.detach()), 0.0).backward()
            finalize_model_grads([net_d])
            optimizer_d.step()
            net_g.zero_grad()
            judge(net_d(fake), 1.0).backward()
            finalize_model_grads([net_g])
            optimizer_g.step()
        with net_d.gathered(), net_g.gathered():
            assert_trained_alike({**named("d", net_d.module), **named("g", net_g.module)}, expected, 1e-9)


def plugin_of(name: str) -> Any:
    buckets = {"max_norm": 0.0, "precision": "fp32"}
    if name == "Gemini":
        return GeminiPlugin(**buckets)
    return LowLevelZeroPlugin(stage=int(name[-1]), reduce_bucket_size_in_m=2.0**-15, **buckets)


@ranks(1, 2)
@pytest.mark.parametrize("name", ["LowLevelZero 1", "LowLevelZero 2", "Gemini"])
def test_the_dcgan_loop_as_it_stands_trains_under_plugins(rank: int, world: int, name: str) -> None:
    """Its lines are kept: `netD.zero_grad()` is called of the model, and gradients of the generator's loss stay."""
    expected = gan_reference(world, adam)
    boosters = [Booster(plugin=plugin_of(name)) for _ in "dg"]
    net_d, net_g = discriminator().float(), generator().float()
    net_d, optimizer_d, *_ = boosters[0].boost(net_d, adam(net_d.parameters()))
    net_g, optimizer_g, *_ = boosters[1].boost(net_g, adam(net_g.parameters()))
    for step in range(STEPS):
        real, noise = (value.float() for value in draw(rank, step))
        boosters[0].backward(judge(net_d(real), 1.0), optimizer_d)
        optimizer_d.clip_grad_by_norm(1e-4)  # dropped with its gradients
        net_d.zero_grad()
        boosters[0].backward(judge(net_d(real), 1.0), optimizer_d)
        fake = net_g(noise)
        boosters[0].backward(judge(net_d(fake.detach()), 0.0), optimizer_d)
        optimizer_d.step()
        net_g.zero_grad()
        boosters[1].backward(judge(net_d(fake), 1.0), optimizer_g)
        optimizer_g.step()
    ours = {}
    for prefix, net in (("d", net_d), ("g", net_g)):
        with net.gathered():
            ours |= named(prefix, net.unwrap())
    assert_trained_alike(ours, expected, 2e-6)


def never_zeroed(model: nn.Module, world: int, max_norm: float) -> dict[str, torch.Tensor]:
    """Plain torch, whose gradients pile up; clipped in place where `max_norm` is not 0."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    for step in range(STEPS):
        sum((loss_of(model, r, step) / world for r in range(world)), torch.zeros(())).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return named("m", model)


@ranks(2)
@pytest.mark.parametrize("scale_later", [False, True])
@pytest.mark.parametrize("max_norm", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.in_suite()
def test_a_loop_that_never_zeroes_adds_to_what_the_step_has_left(
    rank: int, world: int, max_norm: float, scale_later: bool, dtype: torch.dtype
) -> None:
    """What stands there is the clipped gradient, as after torch's clip_grad_norm_."""
    parallel_state.initialize_model_parallel()
    expected = never_zeroed(make_net(), world, max_norm)
    start = named("m", make_net())
    for strategy in STRATEGIES:
        ddp = wrap(
            make_net(dtype), data_parallel_sharding_strategy=strategy, bucket_size=30, scale_in_optimizer=scale_later
        )
        config = OptimizerConfig(optimizer="sgd", lr=0.03, sgd_momentum=0.0, weight_decay=0.0, clip_grad=max_norm)
        optimizer = get_megatron_optimizer(config, [ddp], config_overrides={})
        for step in range(STEPS):
            loss_of(ddp, rank, step).backward()
            finalize_model_grads([ddp])
            optimizer.step()
        with ddp.gathered():
            ours = named("m", ddp.module)
        for name, want in expected.items():
            bound = 1e-9 if dtype is torch.float64 else 2e-5
            torch.testing.assert_close(ours[name].double(), want, atol=bound, rtol=bound, msg=f"{strategy} {name}")
            assert (want - start[name]).abs().max() > 1e-3


@ranks(2)
def test_gradients_in_16_bits_that_a_step_read_through_scratch_are_added_to_as_clipped(rank: int, world: int) -> None:
    """They were not multiplied in memory, so what is added to is multiplied first."""
    parallel_state.initialize_model_parallel()
    for strategy in ("optim", "optim_grads", "no_shard"):
        ddp = wrap(make_net(torch.bfloat16), data_parallel_sharding_strategy=strategy, bucket_size=30)
        plain = make_net(torch.bfloat16)
        first, second = mean_over_ranks(plain, world, (0,)), mean_over_ranks(plain, world, (1,))
        norm = torch.cat([grad.flatten() for grad in first.values()]).norm()
        clip = 3 / norm.item()
        assert clip < 0.5
        config = OptimizerConfig(optimizer="sgd", lr=1e-6, sgd_momentum=0.0, weight_decay=0.0, clip_grad=3, bf16=True)
        optimizer = get_megatron_optimizer(config, [ddp], config_overrides={})
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        optimizer.step()
        loss_of(ddp, rank, 1).backward()
        if strategy == "no_shard":  # `.grad` shows it as it was, and the new gradient lies in it
            with pytest.raises(SyncError, match="already reduced, was still in `.grad`"):
                finalize_model_grads([ddp])
            continue
        finalize_model_grads([ddp])
        expected = {name: clip * first[name] + second[name] for name in first}
        assert_same(whole_grads(ddp), expected, rtol=0.03)


@ranks(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_that_is_deleted_after_a_step_gives_its_memory_back_at_once(
    rank: int, world: int, strategy: str
) -> None:
    """Without the collector of cycles: the next model on a GPU needs the memory."""
    parallel_state.initialize_model_parallel()
    gc.collect()
    gc.disable()
    try:
        model = wrap(discriminator(), data_parallel_sharding_strategy=strategy)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [model])
        judge(model(draw(0, 0)[0]), 1.0).backward()
        finalize_model_grads([model])
        optimizer.step()
        bucket = weakref.ref(model.engine.buckets[0])
        del model, optimizer
        assert bucket() is None
    finally:
        gc.enable()

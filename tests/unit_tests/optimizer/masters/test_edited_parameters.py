"""Weights that are loaded or edited after the optimizer was made are what the next step goes on from."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import LowLevelZeroPlugin
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

LR, MOMENTUM = 0.03, 0.9


class Weights(nn.Module):
    """The loss is linear in every weight, so gradients are the small whole numbers that a rank is given, exactly."""

    def __init__(self, dtype: torch.dtype, *, channels_last: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shapes = {"kernel": (4, 3, 5, 5), "matrix": (24, 16), "bias": (37,)}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator).to(dtype)
            if channels_last and len(shape) == 4:
                value = value.to(memory_format=torch.channels_last)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, rank: int, step: int) -> torch.Tensor:
        products = [(p.float() * gradient(p, rank, step)).sum() for p in self.parameters()]
        return torch.stack(products).sum()


def gradient(param: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-4, 5, param.shape, generator=generator).float()


class OneProcess:
    """fp32 masters, stepped by torch; parameters are the masters rounded, and an edited element is its own master."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.module = Weights(dtype)
        self.masters = {name: nn.Parameter(p.detach().float()) for name, p in self.module.named_parameters()}
        self.sgd = torch.optim.SGD(list(self.masters.values()), lr=LR, momentum=MOMENTUM)

    def edit(self, change: Callable[[nn.Module], None]) -> None:
        before = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        change(self.module)
        for name, param in self.module.named_parameters():
            kept = param.detach() == before[name]
            self.masters[name].data = torch.where(kept, self.masters[name].data, param.detach().float())

    def step(self, world: int, step: int) -> None:
        for name, param in self.module.named_parameters():
            grads = [gradient(param, rank, step) for rank in range(world)]
            self.masters[name].grad = torch.stack(grads).mean(0)
            if not param.requires_grad:
                self.masters[name].grad = None
        self.sgd.step()
        for name, param in self.module.named_parameters():
            param.data.copy_(self.masters[name].data)


def loaded(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(50)
    module.load_state_dict({n: torch.randn(p.shape, generator=generator) for n, p in module.state_dict().items()})


def copied_through_data(module: Any) -> None:
    module.matrix.data.copy_(torch.randn(24, 16, generator=torch.Generator().manual_seed(51)))


def pruned_through_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.data.mul_(torch.arange(param.numel()).view(param.shape) % 3 != 0)


def scaled_under_no_grad(module: Any) -> None:
    with torch.no_grad():
        module.kernel.mul_(0.5)
        module.bias[5:9] = -1.25


def initialized_again(module: Any) -> None:
    torch.manual_seed(52)
    nn.init.uniform_(module.bias)
    nn.init.zeros_(module.kernel)


def frozen_and_changed(module: Any) -> None:
    module.bias.requires_grad_(False)
    module.bias.data.fill_(2.5)


EDITS = (
    loaded,
    copied_through_data,
    pruned_through_data,
    scaled_under_no_grad,
    initialized_again,
    frozen_and_changed,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AWARE = {"use_precision_aware_optimizer": True, "main_grads_dtype": BF16}

# name: (dtype, strategies, options of the wrapper, options of the optimizer, relative tolerance of masters)
CASES: dict[str, tuple[torch.dtype, tuple[str, ...], dict[str, Any], dict[str, Any], float]] = {
    "bf16": (BF16, ("no_shard", "optim", "optim_grads"), {}, {"bf16": True}, 1e-5),
    "bf16, fp32 gradients": (BF16, ("no_shard", "optim"), {"grad_reduce_in_fp32": True}, {"bf16": True}, 1e-5),
    "fp16": (FP16, ("no_shard", "optim"), {}, {"fp16": True, "loss_scale": 1.0}, 1e-5),
    "channels_last": (FP32, ("no_shard", "optim"), {}, {}, 1e-5),
    "on the host": (
        BF16,
        ("optim",),
        {"grad_reduce_in_fp32": True},
        {"bf16": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
        1e-5,
    ),
}


def build(case: str, strategy: str) -> tuple[DistributedDataParallel, Any]:
    dtype, _, wrapper, options, _ = CASES[case]
    model = Weights(dtype, channels_last=case == "channels_last")
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, **wrapper)
    config = OptimizerConfig(optimizer="sgd", lr=LR, sgd_momentum=MOMENTUM, weight_decay=0.0, clip_grad=0.0, **options)
    return ddp, get_megatron_optimizer(config, [ddp])


def train(ddp: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    ddp(rank, step).backward()
    finalize_model_grads([ddp])
    assert optimizer.step()[0]


def masters_of(optimizer: Any) -> Iterator[tuple[str, slice, torch.Tensor]]:
    for name, entries in optimizer.state_by_parameter().items():
        for entry in entries:
            if "master" in entry:
                yield name, slice(entry["offset"], entry["offset"] + entry["numel"]), entry["master"].float()


def compare(ddp: DistributedDataParallel, optimizer: Any, reference: OneProcess, rtol: float, what: str) -> None:
    for name, want in reference.module.named_parameters():
        have = ddp.module.get_parameter(name)
        ulp = max(rtol, torch.finfo(have.dtype).eps)
        torch.testing.assert_close(have, want, rtol=ulp, atol=ulp, msg=lambda m, n=name: f"{what}, {n}: {m}")
    for name, part, have in masters_of(optimizer):
        want = reference.masters[name].detach().view(-1)[part]
        torch.testing.assert_close(have, want, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{what}, master {n}: {m}")


@ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_the_next_step_goes_on_from_edited_weights(rank: int, world: int, case: str) -> None:
    parallel_state.initialize_model_parallel()
    dtype, strategies, _, _, rtol = CASES[case]
    for strategy in strategies:
        ddp, optimizer = build(case, strategy)
        reference = OneProcess(dtype)
        for step in range(2 + len(EDITS)):
            what = f"{strategy} before edits"
            if step >= 2:
                change = EDITS[step - 2]
                what = f"{strategy} after weights were {change.__name__}"
                change(ddp.module)
                reference.edit(change)
            train(ddp, optimizer, rank, step)
            reference.step(world, step)
            compare(ddp, optimizer, reference, rtol, what)


@ranks(2)
def test_a_state_that_is_saved_after_an_edit_holds_the_edited_masters(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp, optimizer = build("bf16", "optim")
    train(ddp, optimizer, rank, 0)
    scaled_under_no_grad(ddp.module)
    for name, part, master in masters_of(optimizer):
        assert torch.equal(master.bfloat16(), ddp.module.get_parameter(name).detach().view(-1)[part])


@ranks(2)
@pytest.mark.parametrize("first", ["model", "optimizer", "no model"])
def test_loaded_masters_stay_where_they_round_to_the_models_weights(rank: int, world: int, first: str) -> None:
    """The order of loading does not matter. Where only the optimizer is loaded, the model's weights are the weights."""
    parallel_state.initialize_model_parallel()
    ddp, optimizer = build("bf16", "optim")
    for step in range(3):
        train(ddp, optimizer, rank, step)
    weights = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    state = optimizer.state_dict()
    saved = {name: master.clone() for name, _, master in masters_of(optimizer)}
    other, its = build("bf16", "optim")
    if first == "model":
        other.load_state_dict(weights)
    its.load_state_dict(state)
    if first == "optimizer":
        other.load_state_dict(weights)
    for name, part, master in masters_of(its):
        here = other.module.get_parameter(name).detach().view(-1)[part].float()
        if first == "no model":
            assert torch.equal(master.bfloat16().float(), here)
            assert not torch.equal(saved[name].bfloat16().float(), here)
        else:
            assert torch.equal(master, saved[name]) and not torch.equal(master, here)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_weights_with_remainders_go_on_from_an_edit_and_zeros_from_zero(rank: int, world: int, strategy: str) -> None:
    """An edited weight keeps its remainder, so its master is at most half a unit of the last place from it."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(Weights(BF16), data_parallel_sharding_strategy=strategy)
    config = OptimizerConfig(
        optimizer="sgd", lr=LR, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0, bf16=True, **AWARE
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    for step in range(2):
        train(ddp, optimizer, rank, step)
    for step, change in enumerate((pruned_through_data, loaded, pruned_through_data), start=2):
        change(ddp.module)
        before = {name: p.detach().float() for name, p in ddp.module.named_parameters()}
        train(ddp, optimizer, rank, step)
        for name, param in ddp.module.named_parameters():
            mean = torch.stack([gradient(param, r, step) for r in range(world)]).mean(0)
            zero = before[name] == 0
            want = before[name] - LR * mean
            torch.testing.assert_close(param.float(), want, rtol=2**-7, atol=2**-7)
            assert zero.sum() > 5 or change is loaded
            torch.testing.assert_close(param.float()[zero], want[zero].bfloat16().float(), rtol=0, atol=0)


@ranks(2)
def test_optimizers_of_a_chain_notice_edits(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    built = [build("bf16", strategy) for strategy in ("optim", "optim")]
    chain = ChainedOptimizer([optimizer for _, optimizer in built])
    reference = OneProcess(BF16)
    for step in range(3):
        if step == 2:
            reference.edit(loaded)
            for ddp, _ in built:
                loaded(ddp.module)
        chain.zero_grad()
        for ddp, _ in built:
            ddp(rank, step).backward()
        finalize_model_grads([ddp for ddp, _ in built])
        assert chain.step()[0]
        reference.step(world, step)
        for ddp, optimizer in built:
            compare(ddp, optimizer, reference, 1e-5, f"step {step}")


@ranks(2)
@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp16")])
def test_low_level_zero_notices_edits(rank: int, world: int, stage: int, precision: str) -> None:
    dtype = BF16 if precision == "bf16" else FP16
    model = Weights(FP32)
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision=precision, initial_scale=1.0))
    boosted, optimizer, *_ = booster.boost(model, sgd)
    reference = OneProcess(dtype)
    for name, master in reference.masters.items():
        master.data.copy_(reference.module.get_parameter(name).data)
    for step in range(2 + len(EDITS) - 1):
        if step >= 2:
            EDITS[step - 2](boosted.unwrap())
            reference.edit(EDITS[step - 2])
        optimizer.zero_grad()
        booster.backward(boosted(rank, step), optimizer)
        optimizer.step()
        reference.step(world, step)
        compare(boosted.module, optimizer.engine, reference, 1e-5, f"step {step}")

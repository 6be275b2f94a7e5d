"""The watch of the first steps says nothing about right programs, and leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.distributed.guard.loops import CLASSES, WIDTH, Net, SplitNet, report_of, samples, tokens
from tests.unit_tests.distributed.guard.test_first_steps import Steps, net_program, ours, sgd, split_program, train
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

# -- right programs ----------------------------------------------------------------------------------------------------


def gan_of_two_models() -> Steps:
    maker, judge = wrap(Net()), wrap(nn.Linear(CLASSES, 1))
    optimizers = sgd(maker), sgd(judge)
    for step in range(10):
        for _ in range(3):  # the judge learns more often
            judge.zero_grad_buffer()
            (judge(maker(samples(step)).detach()).mean() - judge(samples(step)[:, :CLASSES]).mean()).backward()
            finalize_model_grads([judge])
            optimizers[1].step()
        maker.zero_grad_buffer()
        judge(maker(samples(step))).mean().backward()
        finalize_model_grads([maker])
        optimizers[0].step()
        judge.zero_grad_buffer()
        yield


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = Net(), nn.Sequential(nn.Linear(CLASSES, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.judge(self.maker(x)).mean()


def gan_in_one_model() -> Steps:
    """Each loss gives both parts a gradient, and each part has an optimizer, which zeroes that part alone."""
    model = wrap(Gan())
    parts = [sgd(model.module.judge), sgd(model.module.maker)]
    for step in range(10):
        for sign, optimizer in zip((1, -1), parts, strict=True):
            optimizer.zero_grad()
            (sign * model(samples(step))).backward()
            finalize_model_grads([model])
            yield
            optimizer.step()


def adapters() -> Steps:
    """Frozen matrices, and two small trained ones, of which the first has no gradient while the second is zero."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Net().requires_grad_(False)
            torch.manual_seed(9)
            self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(CLASSES, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + x @ self.a.T @ self.b.T

    model = wrap(Adapted())
    return train(model, sgd(model), lambda step: model(samples(step)).pow(2).mean())


class Choosing(nn.Module):
    """A router and experts, most of which see no token; the first one never does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.router = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1)[:, 3:5].max(-1)
        parts = [self.experts[3 + int(n)](row) * w for row, w, n in zip(x, weight, chosen, strict=True)]
        return torch.stack(parts)


class Alternating(Net):
    """Two heads that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(12, CLASSES)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.norm(torch.tanh(self.first(x)))
        hidden = self.layers[1](self.layers[0](hidden))
        return (self.last if (self.calls + dist.get_rank()) % 2 else self.other)(hidden)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.embedding, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(x.abs().long() % 11)))


def any_model(make: Callable[[], nn.Module], optimizer: Any = sgd, **options: Any) -> Steps:
    model = wrap(make(), **options)
    return train(model, optimizer(model), lambda step: model(samples(step)).pow(2).mean())


def averages() -> Steps:
    """A copy of the model follows it, and is evaluated before the first step."""
    model = wrap(Net())
    average = copy.deepcopy(model)
    for mode in (model.eval(), average.eval()):
        mode(samples(99, rank=0))
    model.train()

    def follow(step: int) -> None:
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.1)

    return train(model, sgd(model), lambda step: model(samples(step)).pow(2).mean(), before_step=follow)


def loss_scale_that_overflows() -> Steps:
    """fp16 with a scale that is too high for five steps."""
    model = wrap(Net().half(), grad_reduce_in_fp32=True)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.01, fp16=True, initial_loss_scale=2.0**30, hysteresis=1), [model]
    )
    for step in range(10):
        optimizer.zero_grad()
        optimizer.scale_loss(model(samples(step).half()).float().pow(2).mean()).backward()
        finalize_model_grads([model])
        yield
        optimizer.step()


def accumulates() -> Steps:
    model = wrap(Net(), overlap_grad_reduce=True)
    optimizer = sgd(model)
    for step in range(10):
        with model.no_sync():
            model(samples(2 * step)).pow(2).mean().backward()
        model(samples(2 * step + 1)).pow(2).mean().backward()
        finalize_model_grads([model])
        yield
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def zeroes_in_place_after_the_forward() -> Steps:
    model = wrap(Net())
    optimizer = sgd(model)
    for step in range(10):
        loss = model(samples(step)).pow(2).mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        finalize_model_grads([model])
        yield
        optimizer.step()


def finalizes_twice_a_step() -> Steps:
    """The norm is looked at before the step, and the step is made every other time."""
    return net_program(steps_at=lambda step: step % 2 == 1)


def by_hand() -> Steps:
    model = wrap(Net())
    for step in range(10):
        model.zero_grad_buffer()
        model(samples(step)).pow(2).mean().backward()
        finalize_model_grads([model])
        yield
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad


def reads_gradients_alone() -> Steps:
    """Another model is trained in the meantime by an optimizer of its own."""
    other = nn.Linear(3, 3)
    optimizer = sgd(other)
    model = wrap(Net())
    for step in range(10):
        model.zero_grad_buffer()
        model(samples(step)).pow(2).mean().backward()
        finalize_model_grads([model])
        optimizer.step()
        yield


def finalizes_what_is_dropped(optimizer: Callable[[DistributedDataParallel], Any]) -> Steps:
    """A GAN's discriminator: the generator's loss adds to its gradients, is finalized too, and is dropped."""
    model = wrap(Net())
    steps = optimizer(model)
    for step in range(10):
        steps.zero_grad()
        model(samples(step)).pow(2).mean().backward()
        finalize_model_grads([model])
        steps.step()
        model(samples(step + 1)).mean().backward()
        finalize_model_grads([model])
        yield


def adds_what_is_dropped() -> Steps:
    """As above, but the generator's gradients are dropped before they are finalized."""
    model = wrap(Net())
    optimizer = sgd(model)
    for step in range(10):
        model.zero_grad_buffer()
        model(samples(step)).pow(2).mean().backward()
        finalize_model_grads([model])
        yield
        optimizer.step()
        model(samples(step + 1)).mean().backward()


RIGHT: dict[str, Callable[[], Steps]] = {
    "a plain loop": net_program,
    "warm-up from a learning rate of 0": lambda: net_program(optimizer=lambda model: sgd(model, lr=0.0)),
    "one batch again and again, on all ranks": lambda: net_program(batch=lambda step: samples(0, rank=0)),
    "constants on all ranks": lambda: net_program(batch=lambda step: torch.full((4, WIDTH), float(step + 1))),
    "a GAN of two models": gan_of_two_models,
    "a GAN in one model": gan_in_one_model,
    "a discriminator whose last gradients are finalized and dropped": lambda: finalizes_what_is_dropped(sgd),
    "the same with our optimizer": lambda: finalizes_what_is_dropped(ours),
    "a discriminator whose last gradients are dropped": adds_what_is_dropped,
    "adapters": adapters,
    "experts without tokens": lambda: any_model(Choosing),
    "heads that take turns": lambda: any_model(Alternating),
    "tied weights": lambda: any_model(Tied),
    "a moving average, and evaluation first": averages,
    "a loss scale that overflows": loss_scale_that_overflows,
    "accumulation": accumulates,
    "zeroing in place after the forward": zeroes_in_place_after_the_forward,
    "a step in every other finalize": finalizes_twice_a_step,
    "steps by hand": by_hand,
    "gradients alone": reads_gradients_alone,
    "updates that are lost in rounding": lambda: net_program(
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-12)
    ),
    "sharded optimizer": lambda: any_model(Net, ours, data_parallel_sharding_strategy="optim"),
    "sharded gradients": lambda: any_model(Net, ours, data_parallel_sharding_strategy="optim_grads"),
    "sharded parameters": lambda: any_model(Net, ours, data_parallel_sharding_strategy="optim_grads_params"),
}


@ranks(2)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_over_data_parallelism_hears_nothing(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel()
    said = report_of(RIGHT[name](), steps=8)
    assert said is None, said


def clips_by_the_whole_norm() -> Steps:
    model = wrap(SplitNet())
    return train(model, ours(model, clip_grad=0.01), lambda step: model(*tokens(step)))


def with_autocast() -> Steps:
    model = wrap(SplitNet())

    def loss(step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(*tokens(step))

    return train(model, sgd(model), loss)


def in_16_bits(dtype: torch.dtype) -> Steps:
    model = wrap(SplitNet().to(dtype), grad_reduce_in_fp32=dtype is torch.float16)
    return train(model, ours(model, loss_scale=1.0), lambda step: model(*tokens(step)).float())


def tries_a_batch_again() -> Steps:
    """One rank is given a token that does not exist, and its batch once more after the error."""
    model = wrap(SplitNet())

    def loss(step: int) -> torch.Tensor:
        if dist.get_rank() == 1:
            with pytest.raises(IndexError):
                model(tokens(step)[0] + 10**6, *tokens(step)[1:])
        return model(*tokens(step))

    return train(model, sgd(model), loss)


def gives_a_batch_up() -> Steps:
    """The ranks find before backward that they have different batches, and go on with the next one."""
    model = wrap(SplitNet())

    def loss(step: int) -> torch.Tensor:
        model(*tokens(step + 100 * (1 + dist.get_rank())))
        model.zero_grad_buffer()
        return model(*tokens(step))

    return train(model, sgd(model), loss)


RIGHT_OVER_TENSOR: dict[str, Callable[[], Steps]] = {
    "a forward that failed on one rank": tries_a_batch_again,
    "a batch without a backward": gives_a_batch_up,
    "split layers": split_program,
    "a clip by the whole norm": clips_by_the_whole_norm,
    "autocast": with_autocast,
    "16 bits": lambda: in_16_bits(torch.bfloat16),
    "16 bits that end early": lambda: in_16_bits(torch.float16),
    "a network of which each rank holds a copy": lambda: net_program(batch=lambda step: samples(step, rank=0)),
    "sharded parameters": lambda: (
        lambda model: train(model, ours(model), lambda step: model(samples(step, rank=0)).pow(2).mean())
    )(wrap(Net(), data_parallel_sharding_strategy="optim_grads_params")),
}


@ranks(2)
@pytest.mark.parametrize("name", RIGHT_OVER_TENSOR)
def test_a_right_program_over_tensor_parallelism_hears_nothing(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    said = report_of(RIGHT_OVER_TENSOR[name](), steps=4)
    assert said is None, said


@ranks(2)
def test_warn_does_not_raise_and_ignore_says_nothing(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for option, kind in (("warn", "warning"), ("ignore", None)):
        model = wrap(SplitNet("no sum in backward"), first_steps=option)
        program = train(model, sgd(model), lambda step, model=model: model(*tokens(step)))
        said = report_of(program, steps=1)
        assert (said.kind if said else None) == (kind if rank == 0 else None), said
        assert not model.engine.first_steps.active
    with pytest.raises(ValueError, match="first_steps 'no' is not one of check, warn, ignore"):
        DistributedDataParallelConfig(first_steps="no")


@ranks(1)
def test_one_rank_is_not_watched(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = wrap(Net())
    assert report_of(train(model, sgd(model), lambda step: model(samples(step)).pow(2).mean())) is None
    assert not model.engine.first_steps.active


@ranks(2)
def test_after_the_first_steps_nothing_is_left_of_the_watch(rank: int, world: int) -> None:
    """Gradients are compared in the first step, and weights after the first two."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = wrap(SplitNet())
    program = train(model, sgd(model), lambda step: model(*tokens(step)))
    for looks, compares in ((False, True), (False, True), (False, False)):
        next(program)
        assert model.engine.first_steps.active == looks and model.engine.weights.is_due == compares
    assert not model.engine.first_steps.inputs and model.engine.weights.sums is None

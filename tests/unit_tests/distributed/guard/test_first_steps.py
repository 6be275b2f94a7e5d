"""Mistakes of users are found in the first two steps without an option, and right programs hear nothing."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.context_parallel import get_batch_on_this_cp_rank
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.model_parallel_config import ModelParallelConfig
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.pipeline_parallel import PipelineRunner
from core.pipeline_parallel.layout import PipelineLayout
from tests.unit_tests.distributed.guard.loops import CLASSES, WIDTH, Net, SplitNet, Told, samples, tokens, told_by
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

Steps = Iterator[None]


def ours(model: DistributedDataParallel, **options: Any) -> Any:
    return get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1, **options), [model])


def train(
    model: DistributedDataParallel,
    optimizer: Any,
    loss: Callable[[int], torch.Tensor],
    *,
    before_step: Callable[[int], None] = lambda step: None,
    steps_at: Callable[[int], bool] = lambda step: True,
    zeroes: bool = True,
) -> Steps:
    """A loop; `before_step` runs between finalize and the step, which is made where `steps_at` says so."""
    step = 0
    while True:
        loss(step).backward()
        finalize_model_grads([model])
        yield
        before_step(step)
        if steps_at(step):
            optimizer.step()
        if zeroes:
            optimizer.zero_grad()
        step += 1


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def is_odd() -> bool:
    return dist.get_rank() == 1


# -- mistakes over tensor parallelism ----------------------------------------------------------------------------------


def split_program(*mistakes: str, batch: Any = tokens, config: Any = None, **about: Any) -> Steps:
    model = wrap(SplitNet(*mistakes), config)
    optimizer = about.pop("optimizer", sgd)(model)
    return train(model, optimizer, lambda step: model(*batch(step)), **about)


def clips_by_rank() -> Steps:
    model = wrap(SplitNet())

    def clip(step: int) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    return train(model, sgd(model), lambda step: model(*tokens(step)), before_step=clip)


def initialised_again() -> Steps:
    model = wrap(SplitNet())
    nn.init.normal_(model.module.head.weight)  # each rank with its own seed
    return train(model, sgd(model), lambda step: model(*tokens(step)))


def norm_under_sequence_parallelism() -> Steps:
    """A norm sees this rank's half of the sequence, and says that it sees all."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
            for param in self.parameters():
                param.sequence_parallel = False
            for param in self.head.parameters():
                param.sequence_parallel = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.norm(x.chunk(2, 0)[dist.get_rank()]))).pow(2).mean()

    model = wrap(Halves(), ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True))
    return train(model, sgd(model), lambda step: model(samples(step, rank=0)))


# name -> (program, kind, step, what is said)
OVER_TENSOR: dict[str, tuple[Callable[[], Steps], str, int, str]] = {
    "no sum in a split layer's backward": (
        lambda: split_program("no sum in backward"),
        *("error", 1),
        r"'layers.1.norm.bias' differs between ranks 0 and 1 of group 'tp' \[0, 1\].* sends back only its own part",
    ),
    "no sum in a split layer's forward": (
        lambda: split_program("no sum in forward"),
        *("error", 1),
        r"'head.bias' differs between ranks 0 and 1 .* are not added over 'tp'",
    ),
    "a norm of this rank's features, declared whole": (
        lambda: split_program("inner is declared whole"),
        *("error", 1),
        r"'layers.1.inner' differs .*declare_gradient\(param, partial_over=\('tp',\)\)",
    ),
    "a norm of this rank's tokens, tagged whole": (
        norm_under_sequence_parallelism,
        *("error", 1),
        r"'norm.bias' differs .*sequence_parallel=False; .*set it True",
    ),
    "other tokens": (
        lambda: split_program(batch=lambda step: tokens(step, dist.get_rank())),
        *("error", 1),
        r"inputs differ between ranks 0 and 1 of group 'tp' \[0, 1\], first in forward 0, 0\. .*data_parallel_rank",
    ),
    "another dropout": (
        lambda: split_program("another dropout"),
        *("error", 1),
        r"'head.bias' differs .* dropped out other elements",
    ),
    "clip_grad_norm_ of torch": (
        clips_by_rank,
        *("error", 2),
        r"has other values on ranks \[1\] .*'tp'.*Likeliest: torch.nn.utils.clip_grad_norm_.*OptimizerConfig",
    ),
    "another learning rate": (
        lambda: split_program(optimizer=lambda model: sgd(model, lr=0.1 if is_odd() else 0.2)),
        *("error", 2),
        r"has other values .*another learning rate",
    ),
    "initialised after the wrap": (
        initialised_again,
        *("error", 1),
        r"'head.weight' has other values .* equal at the wrap.*initialised, loaded or written",
    ),
}


def check(told: Told | None, kind: str, step: int, text: str, *, alike: bool) -> None:
    """All ranks hear the same error; the first one hears of a warning."""
    assert told is not None or (kind == "warning" and dist.get_rank() > 0), f"nothing was said; expected {text}"
    if told is not None:
        assert (told.kind, told.step) == (kind, step), told
        assert re.search(text, told.text), told.text
    if alike:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, told)
        assert everyone == [told] * len(everyone), everyone


@ranks(2)
@pytest.mark.parametrize("name", OVER_TENSOR)
def test_a_mistake_over_tensor_parallelism_is_found(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    program, kind, step, text = OVER_TENSOR[name]
    check(told_by(program()), kind, step, text, alike=True)


@ranks(4)
def test_a_sum_over_another_group_is_found(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    data_rank = parallel_state.get_data_parallel_rank()
    program = split_program("sum over another group", batch=lambda step: tokens(step, data_rank))
    check(told_by(program), "error", 1, r"gradient of 'head.bias' differs between ranks .* of group 'tp'", alike=True)


# -- mistakes over data parallelism ------------------------------------------------------------------------------------


def net_program(batch: Callable[[int], torch.Tensor] = samples, **about: Any) -> Steps:
    model = wrap(Net())
    optimizer = about.pop("optimizer", sgd)(model)
    return train(model, optimizer, lambda step: model(batch(step)).pow(2).mean(), **about)


def clips_on_one_rank() -> Steps:
    model = wrap(Net())

    def clip(step: int) -> None:
        if is_odd():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    return train(model, sgd(model), lambda step: model(samples(step)).pow(2).mean(), before_step=clip)


def link_loses_a_bucket() -> Steps:
    model = wrap(Net())

    def lose(step: int) -> None:
        if is_odd():
            model.module.norm.weight.grad.zero_()

    return train(model, sgd(model), lambda step: model(samples(step)).pow(2).mean(), before_step=lose)


def optimizer_of_a_copy() -> Steps:
    module = Net()
    optimizer = sgd(module)
    model = wrap(copy.deepcopy(module))
    return train(model, optimizer, lambda step: model(samples(step)).pow(2).mean(), zeroes=False)


def optimizer_of_a_part() -> Steps:
    model = wrap(Net())
    optimizer = torch.optim.SGD([p for n, p in model.module.named_parameters() if "layers" not in n], lr=0.1)
    return zeroed(model, optimizer)


def zeroed(model: DistributedDataParallel, optimizer: Any, loss: Any = None) -> Steps:
    """`train` with the wrapper's zero_grad_buffer."""
    loss = loss or (lambda step: model(samples(step)).pow(2).mean())
    for number, _ in enumerate(iter(int, 1)):
        model.zero_grad_buffer()
        loss(number).backward()
        finalize_model_grads([model])
        yield
        optimizer.step()


class Cut(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)).detach()
        return self.last(self.layers[1](self.layers[0](self.norm(x))))


class CutBetweenLayers(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.norm(torch.tanh(self.first(x)))).detach()
        return self.last(self.layers[1](x))


class WithoutHead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second_head = nn.Linear(12, 2)


def model_program(kind: type[Net]) -> Steps:
    model = wrap(kind())
    return train(model, sgd(model), lambda step: model(samples(step)).pow(2).mean())


def frozen_after_the_wrap() -> Steps:
    model = wrap(Net())
    for param in model.module.layers.parameters():
        param.requires_grad_(False)
    return train(model, sgd(model), lambda step: model(samples(step)).pow(2).mean())


def filter_of_names() -> Steps:
    module = Net()
    for name, param in module.named_parameters():
        param.requires_grad_("norm" in name)
    model = wrap(module)
    return train(model, sgd(model), lambda step: model(samples(step)).pow(2).mean())


OVER_DATA: dict[str, tuple[Callable[[], Steps], str, int, str]] = {
    "a clip on one rank": (clips_on_one_rank, "error", 2, r"has other values .*'dp_cp'.*clipped alone"),
    "a link that loses a bucket": (link_loses_a_bucket, "error", 2, r"'norm.weight' has other values .*lost message"),
    "a rank without step": (
        lambda: net_program(steps_at=lambda step: not is_odd()),
        *("error", 2),
        "has other values .*left out an optimizer's step",
    ),
    "another learning rate": (
        lambda: net_program(optimizer=lambda model: sgd(model, lr=0.1 if is_odd() else 0.2)),
        *("error", 2),
        "has other values .*another learning rate",
    ),
    "the same data on all ranks": (
        lambda: net_program(batch=lambda step: samples(step, rank=0)),
        *("warning", 2),
        "all data-parallel ranks were given the same inputs.*DistributedSampler",
    ),
    "gradients are not zeroed": (  # said when the second step's optimizer steps, which is after the second yield
        lambda: net_program(zeroes=False),
        *("warning", 3),
        r"were not zeroed .*zero_grad\(\)",
    ),
    "gradients are not zeroed, ours": (
        lambda: net_program(optimizer=ours, zeroes=False),
        *("warning", 3),
        r"were not zeroed .*zero_grad\(\)",
    ),
    "the optimizer holds a copy's parameters": (
        optimizer_of_a_copy,
        *("warning", 2),
        "10 parameters had a gradient and have not moved.*SGD holds other parameters of the same shapes",
    ),
    "the optimizer holds a part": (
        optimizer_of_a_part,
        *("warning", 2),
        r"4 parameters had a gradient .*no optimizer holds them: 'layers.\d",
    ),
    "a cut graph": (
        lambda: model_program(Cut),
        "warning",
        2,
        "2 of 10 trained .* 'first.weight', 'first.bias'.*detach",
    ),
    "a graph cut between layers": (
        lambda: model_program(CutBetweenLayers),
        *("warning", 2),
        "6 of 10 trained parameters got no gradient",
    ),
    "a head that is never called": (
        lambda: model_program(WithoutHead),
        *("warning", 2),
        "2 of 12 trained parameters got no gradient on any rank: 'second_head.weight', 'second_head.bias'",
    ),
    "frozen after the wrap": (frozen_after_the_wrap, "warning", 2, "4 of 10 parameters were frozen after the wrap"),
    "a filter that freezes all but norms": (filter_of_names, "warning", 2, "only vectors are trained.*all 4 matrices"),
}


@ranks(2)
@pytest.mark.parametrize("name", OVER_DATA)
def test_a_mistake_over_data_parallelism_is_found(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel()
    program, kind, step, text = OVER_DATA[name]
    check(told_by(program()), kind, step, text, alike=kind == "error")


# -- mistakes over other axes ------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("wrong", [False, True])
def test_parts_of_two_batches_in_one_context_parallel_group_are_found(rank: int, world: int, wrong: bool) -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    torch.manual_seed(3)
    model = wrap(nn.Embedding(11, CLASSES))

    def loss(step: int) -> torch.Tensor:
        batch = get_batch_on_this_cp_rank({"tokens": tokens(step, rank if wrong else 0)[0]})
        return model(batch["tokens"]).pow(2).mean()

    told = told_by(train(model, sgd(model), loss))
    if wrong:
        check(told, "error", 1, r"inputs differ .* group 'cp' \[0, 1\].*parts of one batch", alike=True)
    else:
        assert told is None, told


@ranks(2)
@pytest.mark.parametrize("wrong", [False, True])
def test_other_labels_on_the_last_stage_are_found(rank: int, world: int, wrong: bool) -> None:
    """The first stage may be given no labels, and the last one no tokens that are used."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(3)
    stage = nn.Embedding(11, WIDTH) if rank == 0 else nn.Linear(WIDTH, CLASSES)
    model = wrap(stage)

    def forward(chunk: nn.Module, batch: dict[str, torch.Tensor], hidden: torch.Tensor | None) -> torch.Tensor:
        if hidden is None:
            return chunk(batch["tokens"])
        return nn.functional.cross_entropy(chunk(hidden).flatten(0, 1), batch["labels"].flatten())

    shape = [torch.empty(3, 4, WIDTH, device="meta")]
    runner = PipelineRunner([model], PipelineLayout((1, 1), 2), forward, shape)

    def steps() -> Steps:
        for step in range(10):
            model.zero_grad_buffer()
            pairs = [tokens(10 * step + n, rank if wrong else 0) for n in range(2)]
            runner.step([{"tokens": x, "labels": y} for x, y in pairs])
            yield

    told = told_by(steps(), steps=3)
    if wrong:
        check(
            told, "error", 1, r"first stage \(rank 0\) and the last one \(rank 1\).*different microbatches", alike=True
        )
    else:
        assert told is None, told


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
    told = told_by(RIGHT[name](), steps=8)
    assert told is None, told


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


RIGHT_OVER_TENSOR: dict[str, Callable[[], Steps]] = {
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
    told = told_by(RIGHT_OVER_TENSOR[name](), steps=4)
    assert told is None, told


@ranks(2)
def test_warn_does_not_raise_and_ignore_says_nothing(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for option, kind in (("warn", "warning"), ("ignore", None)):
        model = wrap(SplitNet("no sum in backward"), first_steps=option)
        program = train(model, sgd(model), lambda step, model=model: model(*tokens(step)))
        told = told_by(program, steps=1)
        assert (told.kind if told else None) == (kind if rank == 0 else None), told
        assert model.engine.first_steps.active == (option == "warn")
    with pytest.raises(ValueError, match="first_steps 'no' is not one of check, warn, ignore"):
        DistributedDataParallelConfig(first_steps="no")


@ranks(1)
def test_one_rank_is_not_watched(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = wrap(Net())
    assert told_by(train(model, sgd(model), lambda step: model(samples(step)).pow(2).mean())) is None
    assert not model.engine.first_steps.active


@ranks(2)
def test_after_the_second_step_nothing_is_left_of_the_watch(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = wrap(Net())
    program = train(model, sgd(model), lambda step: model(samples(step)).pow(2).mean())
    for active in (True, False):
        next(program)
        watch = model.engine.first_steps
        assert watch.active == active
    assert model.reducer.at_begin is None and not watch.samples and not watch.inputs.noted
    next(program)
    assert not watch.inputs.noted

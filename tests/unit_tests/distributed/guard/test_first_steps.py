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
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.model_parallel_config import ModelParallelConfig
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.pipeline_parallel import PipelineRunner
from core.pipeline_parallel.layout import PipelineLayout
from tests.unit_tests.distributed.guard.loops import CLASSES, WIDTH, Net, Report, SplitNet, report_of, samples, tokens
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


def check(reported: Report | None, kind: str, step: int, text: str, *, alike: bool) -> None:
    """All ranks hear the same error; the first one hears of a warning."""
    assert reported is not None or (kind == "warning" and dist.get_rank() > 0), f"nothing was said; expected {text}"
    if reported is not None:
        assert (reported.kind, reported.step) == (kind, step), reported
        assert re.search(text, reported.text), reported.text
    if alike:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, reported)
        assert everyone == [reported] * len(everyone), everyone


@ranks(2)
@pytest.mark.parametrize("name", OVER_TENSOR)
def test_a_mistake_over_tensor_parallelism_is_found(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    program, kind, step, text = OVER_TENSOR[name]
    check(report_of(program()), kind, step, text, alike=True)


@ranks(4)
def test_a_sum_over_another_group_is_found(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    data_rank = parallel_state.get_data_parallel_rank()
    program = split_program("sum over another group", batch=lambda step: tokens(step, data_rank))
    check(report_of(program), "error", 1, r"gradient of 'head.bias' differs between ranks .* of group 'tp'", alike=True)


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
    check(report_of(program()), kind, step, text, alike=kind == "error")


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

    reported = report_of(train(model, sgd(model), loss))
    if wrong:
        check(reported, "error", 1, r"inputs differ .* group 'cp' \[0, 1\].*parts of one batch", alike=True)
    else:
        assert reported is None, reported


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

    reported = report_of(steps(), steps=3)
    if wrong:
        text = r"first stage \(rank 0\) and the last one \(rank 1\).*different microbatches"
        check(reported, "error", 1, text, alike=True)
    else:
        assert reported is None, reported

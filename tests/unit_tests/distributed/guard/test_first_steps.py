"""Mistakes of users are found in the first two steps without an option, and right programs hear nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.model_parallel_config import ModelParallelConfig
from core.optimizer import OptimizerConfig, get_megatron_optimizer
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
        r"inputs differ between ranks 0 and 1 of group 'tp' \[0, 1\], first in forward 0, input 0\. .*data_para",
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
        r"has other values .*Likeliest: rank 1 has SGD with .*lr=0.1.*rank 0 has SGD with .*lr=0.2",
    ),
    "initialised after the wrap": (
        initialised_again,
        *("error", 1),
        r"gradient of 'head.bias' differs .*seen in this step: parameter 'head.weight' has other values .*initialised",
    ),
}


def check(reported: Report | None, kind: str, step: int, text: str, *, alike: bool) -> None:
    """All ranks hear the same error."""
    assert reported is not None, f"nothing was said; expected {text}"
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


OVER_DATA: dict[str, tuple[Callable[[], Steps], str, int, str]] = {
    "a clip on one rank": (clips_on_one_rank, "error", 2, r"has other values .*'dp_cp'.*clipped alone"),
    "a link that loses a bucket": (link_loses_a_bucket, "error", 2, r"'norm.weight' has other values .*lost message"),
    "a rank without step": (
        lambda: net_program(steps_at=lambda step: not is_odd()),
        *("error", 2),
        "has other values .*Likeliest: rank 1 has made 0 optimizer steps; rank 0 has made 1",
    ),
    "another learning rate": (
        lambda: net_program(optimizer=lambda model: sgd(model, lr=0.1 if is_odd() else 0.2)),
        *("error", 2),
        "has other values .*Likeliest: rank 1 has SGD with .*lr=0.1.*rank 0 has SGD with .*lr=0.2",
    ),
}


@ranks(2)
@pytest.mark.parametrize("name", OVER_DATA)
def test_a_mistake_over_data_parallelism_is_found(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel()
    program, kind, step, text = OVER_DATA[name]
    check(report_of(program()), kind, step, text, alike=True)

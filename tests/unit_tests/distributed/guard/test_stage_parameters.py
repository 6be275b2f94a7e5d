"""A parameter that two pipeline stages hold, and that no rule adds, is an error in the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from tests.unit_tests.distributed.guard.loops import WIDTH, report_of, samples
from tests.unit_tests.distributed.guard.test_first_steps import check, sgd, train
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap


class Stage(nn.Module):
    def __init__(self, names: dict[str, str], *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer, self.word = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.word.shared_embedding = tied  # type: ignore[attr-defined]
        self.global_names = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.word


def report_of_stages(*names: dict[str, str], tied: bool = False) -> Any:
    def steps() -> Iterator[None]:
        model = wrap(Stage(names[dist.get_rank()], tied=tied))
        yield from train(model, sgd(model), lambda step: model(samples(step, rank=0)).pow(2).mean())

    return report_of(steps())


@ranks(2)
def test_a_parameter_of_two_stages_that_nothing_ties_is_found(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    reported = report_of_stages({"layer": "layers.0", "word": "table"}, {"layer": "layers.1", "word": "table"})
    check(reported, "error", 1, r"'table' .* on ranks 0 and 1 of pipeline \[0, 1\].*shared_embedding", alike=True)
    reported = report_of_stages({"layer": "layers.0", "word": "a"}, {"layer": "layers.0", "word": "b"})
    check(reported, "error", 1, "'layers.0.weight' .* held by two stages", alike=True)
    assert report_of_stages({}, {}) is None, "stages number their own layers"
    names = {"layer": "layers.0", "word": "table"}, {"layer": "layers.1", "word": "table"}
    assert report_of_stages(*names, tied=True) is None

"""Twenty steps in a layout are those of one process, and what a single step does not show is seen after a few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from core.distributed import DistributedDataParallel
from core.optimizer import MegatronOptimizer
from core.optimizer.norm.clip_grads import GradMeter
from tests.layouts.layouts import Layout
from tests.layouts.tables import FULL_HOUSE, HOUSES, TRAINED
from tests.layouts.training import TrainingReport, train_gpt
from tests.unit_tests.ranks import ranks

STAGES = Layout(pp=2, schedule="1F1B", microbatches=3)
SHARDED = Layout(dp=2, strategy="optim", overlap=True, bucket_size=900)
EXPERTS = Layout(dp=2, ep=2, experts="alltoall", aux="aux_loss", expert_bias=True)


@ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("layout", [STAGES, SHARDED, EXPERTS], ids=str)
@pytest.mark.in_suite()
def test_five_steps_are_those_of_one_process(rank: int, world: int, layout: Layout, optimizer: str) -> None:
    report = train_gpt(layout, optimizer=optimizer, steps=5)
    assert report.ok, str(report)
    assert report.bound == 1e-6 and len(report.loss_errors) == 5 and report.moved > 0.01
    assert report.largest_error < 1e-10  # the bound leaves room for steps that amplify


@ranks(8, timeout_s=170)
@pytest.mark.nightly
def test_the_full_house_trains_as_one_process_does(rank: int, world: int) -> None:
    report = train_gpt(replace(FULL_HOUSE, strategy="optim"), steps=3)
    assert report.ok, str(report)


@pytest.mark.nightly
@ranks(2, 4, 8, timeout_s=900)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_twenty_steps_are_those_of_one_process(rank: int, world: int, optimizer: str) -> None:
    layouts = [layout for layout in dict.fromkeys((*TRAINED, *HOUSES)) if layout.world == world]
    assert layouts
    for layout in layouts:
        report = train_gpt(layout, optimizer=optimizer, steps=20)
        assert report.ok, str(report)


# --- what one step does not show --------------------------------------------------------------------------------------


def red(report: TrainingReport, *words: str) -> None:
    assert not report.ok and all(word in str(report) for word in words), str(report)


@ranks(2)
def test_a_norm_that_counts_a_copy_twice_is_seen(rank: int, world: int) -> None:
    measure = GradMeter.measure

    def too_large(self: GradMeter, **options: Any) -> Any:
        stats = measure(self, **options)
        return replace(stats, norms={None: stats.norm * 1.01})

    with mock.patch.object(GradMeter, "measure", too_large):
        red(train_gpt(STAGES, steps=3), "the gradient norm is wrong from step 0 on, relative error 0.01")


@ranks(2)
def test_parameters_that_are_not_gathered_are_seen(rank: int, world: int) -> None:
    with mock.patch.object(DistributedDataParallel, "start_param_sync", lambda self, *a, **k: None):
        red(train_gpt(SHARDED, steps=3), "stopped in step 1: parameter", "lost message")  # by the watch of two steps


@ranks(2)
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(dp=2), "stopped in step 2: parameter"),
        (Layout(tp=2), "stopped in step 2: the gradient of"),  # the drift guard sees copies that are not reduced
    ],
    ids=str,
)
def test_a_weight_that_one_rank_changes_is_seen(rank: int, world: int, layout: Layout, words: str) -> None:
    step = MegatronOptimizer.step
    calls = []

    def crooked(self: MegatronOptimizer) -> Any:
        result = step(self)
        calls.append(result)
        if rank == 1 and len(calls) == 2:
            for param in self.model_chunks[0].module.parameters():  # type: ignore[attr-defined]
                param.data *= 1.001
        return result

    with mock.patch.object(MegatronOptimizer, "step", crooked):
        red(train_gpt(layout, steps=4), words)


@ranks(1)
def test_training_that_goes_nowhere_shows_nothing(rank: int, world: int) -> None:
    with mock.patch.dict(
        "tests.layouts.training.OPTIMIZERS", {"sgd": {"optimizer": "sgd", "lr": 0.0, "sgd_momentum": 0}}
    ):
        red(train_gpt(Layout(), steps=2), "too little to show anything")

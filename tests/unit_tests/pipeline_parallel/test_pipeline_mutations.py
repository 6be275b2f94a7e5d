"""The tests of pipelines are tested: each rule dropped, done twice or rescaled must turn them red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from core.distributed import ReplicaDriftError
from core.distributed import finalize_model_grads as finalize_module
from core.distributed.reduce import sync_rules as grad_sync
from core.pipeline_parallel import PipelineLayout, plan_pipeline, runner, stage
from tests.unit_tests.pipeline_parallel.pipeline_reference import build_whole, check_steps, start_pipeline
from tests.unit_tests.ranks import ranks


def tied_sum_dropped() -> Any:
    def sync(chunks: Any) -> None:
        pass

    return mock.patch.dict(finalize_module.__globals__, {"sync_across_stages": sync})


def tied_sum_twice() -> Any:
    once = grad_sync.sync_across_stages

    def sync(chunks: Any) -> None:
        once(chunks)
        once(chunks)

    return mock.patch.dict(finalize_module.__globals__, {"sync_across_stages": sync})


def weight_work(change: Callable[[list[Any]], list[Any]]) -> Any:
    take = stage.Stage._pop_weight_work

    def changed(self: stage.Stage) -> Any:
        self.weight_work = change(self.weight_work)
        return take(self)

    return mock.patch.object(stage.Stage, "_pop_weight_work", changed)


def microbatches_not_averaged() -> Any:
    record = runner.PipelineRunner._record
    return mock.patch.object(
        runner.PipelineRunner, "_record", lambda self, *args: record(self, *args) * len(self.microbatches)
    )


def tokens_from_the_wrong_rank() -> Any:
    return mock.patch.object(PipelineLayout, "last_rank", property(lambda self: self.pp - 1))


MUTATIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "the tied embedding is not summed": (tied_sum_dropped, "1F1B"),
    "the tied embedding is summed twice": (tied_sum_twice, "1F1B"),
    "microbatches are added, not averaged": (microbatches_not_averaged, "1F1B"),
    "weight gradients are forgotten": (lambda: weight_work(lambda work: []), "InterleavedZeroBubble"),
    "one weight gradient is forgotten": (lambda: weight_work(lambda work: work[1:]), "ZBVZeroBubble"),
    "weight gradients are added twice": (lambda: weight_work(lambda work: work * 2), "DualPipeV"),
    "loss and tokens come from the last rank of a V": (tokens_from_the_wrong_rank, "ZBVZeroBubble"),
}


@ranks(2)
@pytest.mark.parametrize("mutation", [None, *MUTATIONS])
def test_a_mutated_rule_is_caught(rank: int, world: int, mutation: str | None) -> None:
    change, schedule = MUTATIONS[mutation] if mutation else (mock.MagicMock, "1F1B")
    pipeline = start_pipeline(
        plan_pipeline(4, 2, schedule=schedule),
        schedule,
        config={"calculate_per_token_loss": schedule == "ZBVZeroBubble"},
        ddp={"overlap_grad_reduce": True},
    )
    red = False
    with change():
        # Built again, so that what is decided when a runner is made is mutated too.
        pipeline = runner.PipelineRunner(
            pipeline.chunks, pipeline.layout, pipeline.forward_step, pipeline.activations, schedule=schedule
        )
        try:
            check_steps(pipeline, build_whole(), 4, per_token=schedule == "ZBVZeroBubble")
        except (AssertionError, ReplicaDriftError):  # the watch of the first steps sees some too
            red = True
    assert red == (mutation is not None)

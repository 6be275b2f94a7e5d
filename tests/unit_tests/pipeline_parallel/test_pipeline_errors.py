"""An error of one stage is raised on all ranks of a pipeline within seconds, and the next step is right.

For a notebook, a sweep, or any loop that catches an error and goes on.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.groups.agree import SyncError
from core.pipeline_parallel import gpt_forward_step, plan_pipeline
from core.watch.waiting import PeerLost
from tests.unit_tests.pipeline_parallel.pipeline_reference import (
    build_whole,
    check_steps,
    microbatch,
    start_pipeline,
    zero_buffers,
)
from tests.unit_tests.ranks import ranks

COUNT = 4


class _Breaks(torch.autograd.Function):
    """The same values, and an error in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("the gradient is odd")


def failing(runner: Any, stage: int, number: int, work: str, only: int | None = None) -> Any:
    """A forward step that fails on one stage at one microbatch. only: on this rank alone."""
    position = list(runner.stage_numbers).index(stage) if stage in runner.stage_numbers else -1

    def step(chunk: Any, batch: Any, hidden: Any) -> Any:
        here = position >= 0 and chunk is runner.chunks[position] and only in (None, dist.get_rank())
        if not here or batch is not runner.microbatches[number]:
            return gpt_forward_step(chunk, batch, hidden)
        if work == "forward":
            raise ValueError("these tokens are odd")
        output = gpt_forward_step(chunk, batch, hidden)
        if isinstance(output, torch.Tensor):
            return _Breaks.apply(output)  # type: ignore[no-untyped-call]
        return type(output)(_Breaks.apply(output.value), output.num_tokens)  # type: ignore[no-untyped-call]

    return step


def batches() -> list[Any]:
    data_rank = parallel_state.get_process_groups().rank("dp_cp")
    return [microbatch(data_rank, number) for number in range(COUNT)]


def fails(runner: Any, stage: int, number: int, work: str, kind: type[Exception] = ValueError) -> None:
    runner.forward_step = failing(runner, stage, number, work)
    begun = time.monotonic()
    said = "these tokens are odd" if work == "forward" else "the gradient is odd"
    with pytest.raises(kind, match=said) as caught:
        runner.step(batches())
    assert time.monotonic() < begun + 10.0
    if stage not in runner.stage_numbers:
        where = f"on stage {stage}: ValueError: {said}"
        assert f"failed in the {work} of microbatch {number} {where}" in str(caught.value)
    runner.forward_step = gpt_forward_step


SCHEDULES = [
    *(("1F1B", stage, number, work) for stage in (0, 1) for number in (0, 3) for work in ("forward", "backward")),
    *(("GPipe", 0, 1, "forward"), ("GPipe", 1, 2, "backward")),
    *(("Interleaved1F1B", 2, 1, "forward"), ("Interleaved1F1B", 1, 0, "backward")),
    *(("ZBVZeroBubble", 3, 0, "forward"), ("ZBVZeroBubble", 2, 1, "backward"), ("ZBVZeroBubble", 0, 2, "backward")),
    *(("InterleavedZeroBubble", 2, 1, "backward"), ("DualPipeV", 1, 0, "forward"), ("DualPipeV", 3, 3, "backward")),
]


@ranks(2)
@pytest.mark.parametrize(("schedule", "stage", "number", "work"), SCHEDULES)
def test_an_error_of_one_stage_reaches_all_and_the_next_step_is_right(
    rank: int, world: int, schedule: str, stage: int, number: int, work: str
) -> None:
    """Also in the first two steps, whose inputs are compared; and without a zero_grad, where nothing was added to."""
    chunks = 2 if schedule not in ("1F1B", "GPipe") else 1
    layout = plan_pipeline(4, world, schedule=schedule, chunks=chunks, microbatches=COUNT)
    whole = build_whole()
    runner = start_pipeline(layout, schedule)
    fails(runner, stage, number, work)
    check_steps(runner, whole, COUNT, steps=1, clear=lambda runner: None)
    zero_buffers(runner)
    fails(runner, stage, number, work)
    check_steps(runner, whole, COUNT)


@ranks(2)
def test_an_error_of_an_evaluation_reaches_all(rank: int, world: int) -> None:
    runner = start_pipeline(plan_pipeline(4, world), "1F1B")
    runner.forward_step = failing(runner, 0, 1, "forward")
    with pytest.raises(ValueError, match="these tokens are odd"):
        runner.evaluate(batches())
    runner.forward_step = gpt_forward_step
    check_steps(runner, build_whole(), COUNT)
    assert runner.evaluate(batches()).loss > 0


@ranks(2)
def test_gradients_that_a_failed_step_has_added_to_are_refused_until_they_are_zeroed(rank: int, world: int) -> None:
    runner = start_pipeline(plan_pipeline(4, world), "1F1B")
    zero_buffers(runner)
    runner.step(batches(), finalize=False)
    fails(runner, 1, 3, "backward")
    with pytest.raises(SyncError, match="a step of its pipeline has failed .*the gradient is odd.*Call zero_grad"):
        runner.step(batches())
    check_steps(runner, build_whole(), COUNT)


@ranks(4)
def test_data_ranks_of_a_pipeline_that_has_failed_raise_too(rank: int, world: int) -> None:
    runner = start_pipeline(plan_pipeline(4, 2), "1F1B")
    data_rank = parallel_state.get_process_groups().rank("dp_cp")
    for strikes in (0, 1):
        zero_buffers(runner)
        if data_rank == strikes:
            fails(runner, 0, 2, "forward")
        else:
            with pytest.raises(SyncError, match="a step of its pipeline has failed .*these tokens are odd"):
                runner.step(batches())
    check_steps(runner, build_whole(), COUNT)


@ranks(4)
def test_an_error_that_all_tensor_parallel_ranks_of_a_stage_have_reaches_all(rank: int, world: int) -> None:
    runner = start_pipeline(plan_pipeline(4, 2), "1F1B", tp=2)
    fails(runner, 1, 1, "forward")
    check_steps(runner, build_whole(), COUNT)


@ranks(4)
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_an_error_of_one_tensor_parallel_rank_ends_the_step_of_all_though_it_is_caught(
    rank: int, world: int, call: str
) -> None:
    """For a loop that catches the error and stays: the others' messages of this step never come."""
    store = dist.PrefixStore(call, dist.group.WORLD.get_group_store())
    runner = start_pipeline(plan_pipeline(4, 2), "1F1B", tp=2)
    runner.forward_step = failing(runner, 0, 1, "forward", only=1)
    begun = time.monotonic()
    with pytest.raises(ValueError if rank == 1 else PeerLost) as caught:
        getattr(runner, call)(batches())
    assert time.monotonic() < begun + 12.0
    said = "rank 1 left a pipeline's step: ValueError: these tokens are odd"
    assert rank in (1, 2) or said in str(caught.value), caught.value  # rank 2 has no group with rank 1
    store.add("ended", 1)
    while store.add("ended", 0) < world:  # the process stays
        time.sleep(0.05)

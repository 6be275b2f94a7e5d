"""What a step of a pipeline holds at most: it does not grow with the number of microbatches."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.plan_jobs import peak_of
from core import parallel_state
from core.distributed import DistributedDataParallelConfig
from core.pipeline_parallel import PipelineRunner, plan_pipeline, stage, wrap_stages
from core.pipeline_parallel.schedules import Arrivals, arrivals
from core_plan.schedule_order import actions_of_ranks
from tests.unit_tests.ranks import ranks

ROWS, WIDTH = 32, 64
SENT = ROWS * WIDTH * 8  # bytes that one stage sends the next


def runner_of(schedule: str, pp: int, chunks: int) -> PipelineRunner:
    layout = plan_pipeline(pp * chunks, pp, schedule=schedule, chunks=chunks)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp)
    numbers = layout.stages_of(parallel_state.get_pipeline_model_parallel_rank())
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)) for _ in numbers]
    wrapped = wrap_stages(None, DistributedDataParallelConfig(), stages)
    last = wrapped[numbers.index(layout.num_stages - 1)] if layout.num_stages - 1 in numbers else None

    def forward_step(chunk: nn.Module, seed: int, hidden: torch.Tensor | None) -> torch.Tensor:
        if hidden is None:
            hidden = torch.full((ROWS, WIDTH), 0.01 * seed, dtype=torch.float64)
        output: torch.Tensor = chunk(hidden)
        return output.pow(2).mean() if chunk is last else output

    shape = [torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta")]
    return PipelineRunner(wrapped, layout, forward_step, shape, schedule=schedule)


@ranks(2, 4)
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1F1B", 1), ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2)]
)
@pytest.mark.in_suite()
def test_more_microbatches_need_no_more_memory(rank: int, world: int, schedule: str, chunks: int) -> None:
    """64 as much as 8 of 1F1B, and as 16 where up to 8 stages hold more of them at once."""
    runner = runner_of(schedule, world, chunks)
    few, many = (peak_of_step(runner, count) for count in (8 * chunks, 64))
    assert few > SENT
    assert many - few < SENT / 2, (few / SENT, many / SENT)
    with mock.patch.object(stage, "_keep_graph_alone", lambda outputs: None):
        kept = peak_of_step(runner, 8 * chunks)
    if schedule == "1F1B":  # in its first backward a stage had what it has sent of each microbatch in flight
        freed = SENT * (world - rank) if rank < world - 1 else 0
        assert abs(kept - few - freed) < SENT / 16, (few / SENT, kept / SENT)  # an element of each stays
        return
    if schedule.startswith("Interleaved") and rank < world - 1:  # in a V the peak is where outputs have gone
        assert kept - few > SENT * 15 / 16, (few / SENT, kept / SENT)
    if schedule.startswith("Interleaved"):
        with mock.patch.object(stage, "passed", lambda *_: False):
            late = peak_of_step(runner, 8 * chunks)
        assert late - few > SENT / 2, "activations that were sent are kept until their gradients come"
    with mock.patch.object(Arrivals, "used", lambda self, *_: False):
        late = peak_of_step(runner, 8 * chunks)
    assert late - few > SENT, "gradients that were sent are kept until the step ends"


def test_activations_say_which_gradients_have_been_used() -> None:
    """Rank 0 has stages 0 and 2: F00 F01 F20 F21 F02 B20 F03 B21 F22 B00 F23 ...; rank 1: F10 F11 ... F12 B10 F13."""
    rows = actions_of_ranks("Interleaved1F1B", plan_pipeline(4, 2, schedule="Interleaved1F1B", chunks=2), 4)
    known = arrivals(rows)
    sent = [(3, 0), (3, 1), (1, 0), (1, 1), (3, 2)]  # by rank 1, in its order
    found = {number: [one for one in sent if known.used(one, (3, number))] for number in range(4)}
    assert found == {0: [], 1: [], 2: [(3, 0), (3, 1)], 3: [(3, 0), (3, 1), (1, 0)]}


def peak_of_step(runner: PipelineRunner, count: int) -> int:
    """Bytes at the highest point of a step, next to parameters and their gradients."""
    runner.step(list(range(count)))  # builds the schedule
    known = [tensor for chunk in runner.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    known += [buffer.grad_data for chunk in runner.chunks for buffer in chunk.grad_buffers]
    for chunk in runner.chunks:
        chunk.zero_grad_buffer()
    found = peak_of(partial(runner.step, list(range(count))), known, alone=False)
    for chunk in runner.chunks:
        chunk.zero_grad_buffer()
    return found

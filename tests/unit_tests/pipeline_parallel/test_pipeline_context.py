"""Losses of microbatches under context parallelism: a sequence's tokens are counted over all ranks that hold it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import parallel_state
from core.context_parallel import split_sequence
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.model_parallel_config import ModelParallelConfig
from core.models import GPTModel
from core.pipeline_parallel import (
    MicrobatchLoss,
    PipelineLayout,
    PipelineRunner,
    get_forward_backward_func,
    wrap_stages,
)
from tests.unit_tests.pipeline_parallel.pipeline_reference import (
    SEQUENCE,
    assert_gradients,
    build_whole,
    microbatch,
    start_pipeline,
    zero_buffers,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import whole_grads

MICROBATCHES = 2


def masked(data_rank: int, number: int, masks: str, cp: int) -> dict[str, Tensor]:
    """A whole microbatch whose mask has unequal sums on the context ranks."""
    batch = microbatch(data_rank, number)
    if masks == "none on rank 0":
        held = split_sequence(torch.arange(SEQUENCE), 0, cp, 0)
        batch["loss_mask"][:, held] = 0.0
    elif masks == "weights":
        batch["loss_mask"] *= torch.linspace(0.05, 0.3, SEQUENCE, dtype=torch.float64)
    elif masks == "none at all" and number == 0:
        batch["loss_mask"].zero_()
    return batch


def whole_losses(
    model: GPTModel, data_ranks: int, masks: str, cp: int, *, per_token: bool
) -> tuple[dict[str, Tensor], list[Tensor], list[float]]:
    """On one process: gradients, the losses of each data rank's microbatches, and the loss of each data rank's step."""
    batches = [[masked(rank, number, masks, cp) for number in range(MICROBATCHES)] for rank in range(data_ranks)]
    all_tokens = sum(float(batch["loss_mask"].sum()) for part in batches for batch in part)
    losses, means = [], []
    model.zero_grad(set_to_none=True)
    for part in batches:
        sums, counts = [], []
        for batch in part:
            total = (model(batch["tokens"], labels=batch["labels"]) * batch["loss_mask"]).sum()
            count = float(batch["loss_mask"].sum())
            weight = all_tokens if per_token else (count or 1.0) * MICROBATCHES * data_ranks
            (total / weight).backward()
            sums.append(total.item())
            counts.append(count)
        divisors = [1.0 if per_token else count or 1.0 for count in counts]
        each = torch.tensor([a / b for a, b in zip(sums, divisors, strict=True)], dtype=torch.float64)
        losses.append(each)
        means.append(sum(sums) / sum(counts) if per_token else each.mean().item())
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, losses, means


@pytest.mark.in_suite()
@ranks(2, 4, timeout_s=90)
@pytest.mark.parametrize("masks", ["random", "none on rank 0", "weights", "none at all"])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_masked_loss_is_that_of_the_whole_sequence(rank: int, world: int, masks: str, per_token: bool) -> None:
    cp = world
    runner = start_pipeline(
        PipelineLayout((4,), 1),
        "1F1B",
        groups={"context_parallel_size": cp},
        config={"context_parallel_size": cp, "calculate_per_token_loss": per_token},
    )
    check_masked_steps(runner, masks, cp, per_token)


@ranks(4)
@pytest.mark.parametrize("per_token", [False, True])
def test_so_it_is_at_the_end_of_a_pipeline(rank: int, world: int, per_token: bool) -> None:
    runner = start_pipeline(
        PipelineLayout((2, 2), 2),
        "1F1B",
        groups={"context_parallel_size": 2},
        config={"context_parallel_size": 2, "calculate_per_token_loss": per_token},
    )
    check_masked_steps(runner, "random", 2, per_token)


@pytest.mark.nightly
@ranks(8, timeout_s=180)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("schedule", "layout", "changes"),
    [
        ("1F1B", PipelineLayout((2, 2), 2), {}),  # next to two data ranks
        ("Interleaved1F1B", PipelineLayout((1, 1, 1, 1), 2), {}),
        ("ZBVZeroBubble", PipelineLayout((1, 1, 1, 1), 2, "v"), {}),
        ("1F1B", PipelineLayout((2, 2), 2), {"sequence_parallel": True}),  # next to two tensor ranks
    ],
)
def test_so_it_is_next_to_every_other_axis(
    rank: int, world: int, per_token: bool, schedule: str, layout: PipelineLayout, changes: dict[str, Any]
) -> None:
    config = {"context_parallel_size": 2, "calculate_per_token_loss": per_token, **changes}
    tp = 2 if changes else 1
    runner = start_pipeline(layout, schedule, tp=tp, groups={"context_parallel_size": 2}, config=config)
    check_masked_steps(runner, "random", 2, per_token)


def check_masked_steps(runner: PipelineRunner, masks: str, cp: int, per_token: bool) -> None:
    """Two steps and an evaluation: gradients and every loss that is reported are those of one process."""
    groups = parallel_state.get_process_groups()
    expected, losses, means = whole_losses(build_whole(), groups.size("dp"), masks, cp, per_token=per_token)
    assert all(grad.norm() > 1e-6 for grad in expected.values()), "the reference is zero"
    mine = [masked(groups.rank("dp"), number, masks, cp) for number in range(MICROBATCHES)]
    parts = [{n: split_sequence(t, 1, cp, groups.rank("cp")) for n, t in batch.items()} for batch in mine]
    wanted = losses[groups.rank("dp")], means[groups.rank("dp")]
    for _ in range(2):
        zero_buffers(runner)
        outcome = runner.step(parts)
        assert_gradients(runner, expected, wrong=wrong_losses(outcome, *wanted))
    assert not wrong_losses(runner.evaluate(parts), *wanted)


def wrong_losses(outcome: Any, losses: Tensor, mean: float) -> list[str]:
    wrong = [] if abs(outcome.loss.item() - mean) <= 1e-12 else [f"loss {outcome.loss.item()} is not {mean}"]
    if outcome.losses and not torch.allclose(torch.stack(outcome.losses), losses, rtol=1e-12, atol=0.0):
        wrong.append(f"losses {outcome.losses} are not {losses}")
    return wrong


class Scale(nn.Module):
    """A model of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def set_input_tensor(self, hidden: Tensor | None) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def started_scale(cp: int) -> list[DistributedDataParallel]:
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    config = ModelParallelConfig(context_parallel_size=cp)
    return wrap_stages(config, DistributedDataParallelConfig(), [Scale()])


@pytest.mark.in_suite()
@ranks(2, 4)
@pytest.mark.parametrize("form", ["(sum, num_tokens, report)", "MicrobatchLoss"])
@pytest.mark.parametrize("count", ["number", "tensor", "column"])
def test_one_token_that_counts_has_its_whole_gradient(rank: int, world: int, form: str, count: str) -> None:
    # The values 1, 2, 3, ... on the ranks, the mask 1 on rank 0 alone: d(w * 1) / dw = 1.
    chunks = started_scale(world)
    mask = float(rank == 0)
    x = torch.tensor(rank + 1.0, dtype=torch.float64)
    tokens = {"number": mask, "tensor": torch.tensor(int(mask)), "column": torch.tensor([mask])}[count]

    if form == "MicrobatchLoss":

        def step(chunk: nn.Module, microbatch: Any, hidden: Any) -> MicrobatchLoss:
            return MicrobatchLoss(chunk(x) * mask, tokens)

        outcome = PipelineRunner(chunks, PipelineLayout((1,), 1), step, []).step([None])
        assert outcome.loss.item() == 1.0
        assert outcome.num_tokens is None
    else:

        def forward_step(data_iterator: Any, model: nn.Module) -> Any:
            return model(x), lambda output: (output * mask, tokens, "seen")

        run = get_forward_backward_func()
        arguments: dict[str, Any] = dict(
            forward_step_func=forward_step, data_iterator=None, model=chunks, seq_length=world, micro_batch_size=1
        )
        assert run(**arguments, num_microbatches=1) == ["seen"]
        chunks[0].finish_grad_sync()
    assert whole_grads(chunks[0])["weight"].item() == 1.0


@ranks(2)
def test_a_mean_without_tokens_stays_the_mean_over_context_ranks(rank: int, world: int) -> None:
    chunks = started_scale(world)
    x = torch.tensor(rank + 1.0, dtype=torch.float64)
    runner = PipelineRunner(chunks, PipelineLayout((1,), 1), lambda chunk, microbatch, hidden: chunk(x), [])
    outcome = runner.step([None])
    assert (outcome.loss.item(), [loss.item() for loss in outcome.losses]) == (1.5, [1.5])
    assert whole_grads(chunks[0])["weight"].item() == 1.5

"""Steps in one go equal half of them, fresh objects, a resume and the other half, bit for bit."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from core import parallel_state
from core.checkpoint import load_checkpoint, save_checkpoint
from core.pipeline_parallel import PipelineRunner, gpt_activations, gpt_forward_step
from core.tensor_parallel import model_parallel_manual_seed
from tests.unit_tests.checkpoint.checkpoint_reference import Job, Layout, build
from tests.unit_tests.pipeline_parallel.pipeline_reference import BATCH, SEQUENCE, microbatch
from tests.unit_tests.ranks import close_pool, run_on_ranks

LAYOUTS = [
    Layout(1, dropout=0.1),
    Layout(2, strategy="optim_grads", dtype=torch.bfloat16, dropout=0.1),
    Layout(4, tp=2, pp=2, ep=2, etp=1, strategy="optim", dropout=0.1),
]
NIGHTLY = [
    *LAYOUTS,
    Layout(3, dropout=0.1),
    Layout(3, strategy="optim", dropout=0.1),
    Layout(3, strategy="optim_grads", dropout=0.1),
    Layout(4, tp=2, pp=2, strategy="optim_grads", dropout=0.1),
    Layout(2, tp=2, dropout=0.1),
    Layout(2, pp=2, vpp=2, dropout=0.1),
    Layout(2, ep=2, strategy="optim", dropout=0.1, algorithm="sgd"),
    Layout(4, strategy="optim", instances=2, dropout=0.1),
    Layout(4, tp=2, strategy="optim", dtype=torch.bfloat16, dropout=0.1),
    Layout(4, pp=2, vpp=2, strategy="optim", dtype=torch.bfloat16, dropout=0.1),
    Layout(8, tp=2, pp=2, ep=2, etp=1, strategy="optim", dtype=torch.bfloat16, dropout=0.1),
]


def train(job: Job, first: int, last: int) -> list[Tensor]:
    """Steps first .. last - 1 of two or more microbatches; the losses, and one draw of every kind of stream a step."""
    activations = gpt_activations(job.config, BATCH, SEQUENCE)
    schedule = "Interleaved1F1B" if job.layout.vpp else "1F1B"
    runner = PipelineRunner(job.chunks, job.pipeline, gpt_forward_step, activations, schedule=schedule)
    seen = []
    for step in range(first, last):
        for chunk in job.chunks:
            chunk.zero_grad_buffer()
        data_rank = job.groups.rank("dp_cp")
        outcome = runner.step([microbatch(data_rank, 10 * step + number) for number in range(2 * job.layout.pp)])
        assert job.optimizer.step()[0]
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        seen += [outcome.loss.detach().double(), torch.tensor(draws, dtype=torch.float64)]
    return seen


def state_of(job: Job) -> dict[str, Tensor]:
    """Everything that training changes, copied."""
    state = {name: tensor.detach().clone() for name, tensor in job.named()}
    for name, entry in job.entries():
        state |= {f"{key}/{name}/{entry['offset']}": torch.as_tensor(v).clone() for key, v in entry.items()}
    return state


def begin(layout: Layout, seed: int) -> Job:
    """A fresh job whose streams stand elsewhere for every seed."""
    job = build(layout)
    random.seed(seed)
    np.random.seed(seed)
    model_parallel_manual_seed(seed)
    return job


def unbroken_and_half(rank: int, layout: Layout, steps: int, root: str) -> None:
    """Leave what an unbroken run has seen and ended with, and a checkpoint of one that stopped in the middle."""
    job = begin(layout, 5)
    before = state_of(job)
    seen = train(job, 0, steps)
    after = state_of(job)
    assert not all(torch.equal(after[name], value) for name, value in before.items()), "training changed nothing"
    torch.save((seen, after), f"{root}/unbroken-{rank}.pt")
    parallel_state.destroy_model_parallel()

    job = begin(layout, 5)
    train(job, 0, steps // 2)
    save_checkpoint(f"{root}/checkpoints", steps // 2, job.chunks, job.optimizer)


def other_half(rank: int, layout: Layout, steps: int, root: str) -> None:
    """Go on from the checkpoint, with other weights and streams until it is loaded."""
    job = begin(dataclasses.replace(layout, seed=2), 99)
    report = load_checkpoint(f"{root}/checkpoints", job.chunks, job.optimizer)
    assert report.step == steps // 2 and report.random_restored
    seen = train(job, report.step, steps)
    expected_seen, expected = torch.load(f"{root}/unbroken-{rank}.pt")
    assert [value.tolist() for value in seen] == [value.tolist() for value in expected_seen[-len(seen) :]]
    found = state_of(job)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.in_suite(1)
def test_a_resumed_run_ends_where_the_unbroken_one_does(layout: Layout, tmp_path: Path) -> None:
    arguments = {"layout": layout, "steps": 4, "root": str(tmp_path)}
    run_on_ranks(unbroken_and_half, layout.world, arguments, timeout_s=120)
    run_on_ranks(other_half, layout.world, arguments, timeout_s=120)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", NIGHTLY, ids=str)
def test_forty_steps_equal_twenty_and_a_resume_in_new_processes(layout: Layout, tmp_path: Path) -> None:
    arguments = {"layout": layout, "steps": 40, "root": str(tmp_path)}
    run_on_ranks(unbroken_and_half, layout.world, arguments, timeout_s=900)
    close_pool()
    run_on_ranks(other_half, layout.world, arguments, timeout_s=600)

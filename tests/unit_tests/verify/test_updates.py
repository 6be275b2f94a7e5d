"""`python -m core verify --steps N` compares the weights after each step with one process that steps the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core import parallel_state
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.verify import note
from core.verify.optimizer_steps import Clip, Step, gradients_of_step
from core.verify.program import Asked, ProgramWatch
from core.verify.report import GradientReport
from tests.layouts import gpt
from tests.layouts.layouts import Layout
from tests.unit_tests.ranks import ranks
from tests.unit_tests.verify.test_program import KINDS, MICROBATCHES, PLUGINS, WHOLE, data_of, train_boosted, wrapped_by

STEPS, CLIP = 3, 0.2
LR = {"adam": 0.05, "sgd": 0.5}


def report_of(program: Callable[[], None], **asked: Any) -> GradientReport:
    """Run a program for at least three steps under the command."""
    watch = ProgramWatch(Asked("a program", steps=STEPS, **asked))
    with watch.active():
        try:
            program()
        except SystemExit as end:
            assert end.code == (0 if watch.reports[-1].ok else 1)
        watch.show_the_rest()
    (report,) = watch.reports
    return report


def train(kind: str, algorithm: str = "adam", fault: str = "") -> None:
    """A loop around any wrapper, with momentum, decay and a schedule, which clips; with a mistake."""
    model = wrapped_by(kind)
    ours, rank, optimizer = hasattr(model, "zero_grad_buffer"), dist.get_rank(), optimizer_of(model, algorithm)
    for step in range(STEPS):
        optimizer.zero_grad()
        if ours:
            model.zero_grad_buffer()
        for number, (x, y) in enumerate(data_of(10 * step + rank)):
            with nullcontext() if number == MICROBATCHES - 1 or not hasattr(model, "no_sync") else model.no_sync():
                (model(x, y) / MICROBATCHES).backward()
        if ours:
            finalize_model_grads([model])
        else:
            assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)) > CLIP, "the limit must count"
        if fault == "zeroed before the step" and step == 1:
            for param in model.parameters():
                param.grad.zero_()
        if fault == "steps twice" and step == 1:
            optimizer.step()
        if (fault, rank, step) != ("rank 1 leaves out a step", 1, 1):
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.7 if fault != "rank 1 has its own schedule" or rank == 0 else 0.8
        if fault == "rank 1 loses its state" and rank == 1:
            optimizer.state.clear()
        if fault == "weights are clamped":
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-0.1, 0.1)


def optimizer_of(model: Any, kind: str = "adam") -> Any:
    if hasattr(model, "zero_grad_buffer"):
        config = OptimizerConfig(optimizer=kind, lr=LR[kind], weight_decay=0.1, clip_grad=CLIP, sgd_momentum=0.9)
        return get_megatron_optimizer(config, [model])
    options: dict[str, Any] = {"momentum": 0.9} if kind == "sgd" else {}
    return {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW}[kind](
        model.parameters(), lr=LR[kind], weight_decay=0.1, **options
    )


@ranks(2)
@pytest.mark.in_suite()
@pytest.mark.parametrize("algorithm", ["adam", "sgd"])
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_weights_of_a_right_program_are_those_of_one_process(rank: int, world: int, kind: str, algorithm: str) -> None:
    parallel_state.initialize_model_parallel()
    asked = {"whole": WHOLE} if kind.startswith("fully_shard") else {}
    report = report_of(lambda: train(kind, algorithm), **asked)
    assert report.ok and report.title.startswith("step 3"), str(report)
    assert re.search(r"weights after 3 steps .* an update \S+e-0[5678]$", report.weights), str(report)


FAULTS = {
    "zeroed before the step": "step 2, .*6 of 6 parameters, first 'norm.weight'.* are zero when the optimizer steps",
    "steps twice": "step 2 of the loop: AdamW steps again with the gradients of its last step",
    "rank 1 leaves out a step": r"step 2, .* on ranks \[1\].*have made \[1, 0\] optimizer steps",
    "rank 1 has its own schedule": r"step 2, .* on ranks \[1\].*group 0 of AdamW has lr=0.04\d* on rank 1 and 0.03",
    "rank 1 loses its state": r"step 2, .*their updates are other ones .* on ranks \[1\] alone: an optimizer's state",
}


@ranks(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_step_is_named(rank: int, world: int, fault: str) -> None:
    report = report_of(lambda: train("DDP of torch", fault=fault))
    assert not report.ok and re.search(FAULTS[fault], str(report).replace("\n", " ")), str(report)


def loop_over(at: int | None = None, clips: bool = False, notes: bool = False) -> None:
    """A plain loop around torch's DDP, in which rank 1 leaves out step `at`; or if there is none, rank 0 evaluates."""
    model, rank = wrapped_by("DDP of torch"), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        microbatch = data_of(10 * step + rank)[0]
        if notes:
            note(lambda whole, x, y: whole(x, y), *microbatch)
        model(*microbatch).backward()
        if at is None and rank == 0 and step > 0:  # after the first step torch's DDP rebuilds buckets in a forward
            time.sleep(0.3)  # until the other rank has ended the step
            with model.no_sync():
                model(*microbatch)
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if (rank, step) != (1, at):
            optimizer.step()
        elif not clips:
            time.sleep(1.0)  # until the other rank's step has begun, so that both hear the error


@ranks(2)
@pytest.mark.parametrize(("at", "notes"), [(0, False), (1, False), (1, True)])
def test_a_step_of_torch_that_one_rank_leaves_out_ends_no_process_and_is_named(
    rank: int, world: int, at: int, notes: bool
) -> None:
    """For users of torch's DDP, whose ranks meet in backwards alone: the comparison waited for a rank that ran on."""
    watch, what = ProgramWatch(Asked("a program")), "noted microbatch" if notes else "forward"
    named = f"rank 1 runs {what} {at + 2} without the optimizer's step that rank 0 makes after {what} {at + 1}"
    with watch.active(), pytest.raises(ValueError, match=named):
        loop_over(at, notes=notes)


@ranks(2)
def test_a_loop_that_notes_its_microbatches_may_evaluate_on_one_rank_before_a_step(rank: int, world: int) -> None:
    report = report_of(lambda: loop_over(notes=True))
    assert report.ok and "3 steps" in report.weights, str(report)


@ranks(2)
def test_weights_that_differ_before_a_step_of_torch_are_its_cause(rank: int, world: int) -> None:
    watch = ProgramWatch(Asked("a program"))
    with watch.active(), pytest.raises(SystemExit):
        loop_over(0, clips=True)
    (report,) = watch.reports
    assert not report.ok and "'norm.weight' had other values on rank 1 than on rank 0 before this step" in report.cause


@ranks(2)
def test_weights_that_a_loop_clamps_are_taken_over_and_said(rank: int, world: int) -> None:
    report = report_of(lambda: train("DDP of torch", fault="weights are clamped"))
    assert report.ok and "3 steps" in report.weights
    assert "something else has written" in str(report)


@ranks(2)
@pytest.mark.in_suite(3)
@pytest.mark.parametrize("kind", PLUGINS)
def test_weights_of_boosted_programs_are_compared(rank: int, world: int, kind: str) -> None:
    try:
        report = report_of(lambda: train_boosted(PLUGINS[kind](), "fp16" if kind == "ddp in fp16" else None))
        assert report.ok and "weights after 3 steps" in report.weights, str(report)
    finally:
        parallel_state.destroy_model_parallel()


LAYOUTS = [
    Layout(pp=2, schedule="1F1B", microbatches=3),
    Layout(tp=2, sp=True, microbatches=2),
    Layout(dp=2, strategy="optim", microbatches=2),
]


@ranks(2)
@pytest.mark.in_suite(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_of_layouts_are_those_of_one_process(rank: int, world: int, layout: Layout) -> None:
    """Of pipelines and split models: the norm of all gradients clips, and optimizers hold parts of the model."""

    def program() -> None:
        with gpt.groups_of(layout) as process_groups:
            job = gpt.job_of(layout, "fp64", process_groups, gpt.wrapper_config(layout))
            config = OptimizerConfig(optimizer="adam", lr=0.01, weight_decay=0.1, clip_grad=0.01)
            optimizer = get_megatron_optimizer(config, job.model.chunks)
            for _ in range(STEPS):
                optimizer.zero_grad()
                job.step(gpt.global_batch(layout))
                optimizer.step()

    report = report_of(program)
    assert report.ok and "weights after 3 steps" in report.weights, str(report)


def sent(grads: dict[str, Tensor], clips: tuple[Clip, ...] = ()) -> Step:
    return Step("SGD", ({"lr": 0.1},), (tuple(grads),), frozenset(), clips, 0.0)


def test_changes_of_gradients_by_hand_are_followed_and_others_are_named() -> None:
    grads = {"a": torch.tensor([3.0, 0.0]).double(), "b": torch.tensor([4.0]).double()}
    times = lambda factor: {name: grad * factor for name, grad in grads.items()}  # noqa: E731
    clip = Clip(("a", "b"), 2.5, 2.0)
    for at_step, clips, expected in ((times(1.0), (), 1.0), (times(0.5), (), 0.5), (times(0.5), (clip,), 0.5)):
        found, note, cause = gradients_of_step(sent(grads, clips), grads, at_step)
        assert not note and not cause
        torch.testing.assert_close(found["b"], grads["b"] * expected, rtol=1e-5, atol=0.0)
    for at_step, clips, said in (
        (times(0.0), (), "zero when the optimizer steps"),
        (times(0.625), (clip,), "clipped gradients are 1.25 times"),  # by the norm of b alone
        (times(2.0), (), "changed by 2 between"),
        ({**grads, "b": grads["b"] + 1.0}, (), "1 of 2 parameters, first 'b', have been changed between"),
        ({**grads, "a": grads["a"] + torch.tensor([0.0, 1.0])}, (clip,), "2 of 2 parameters"),
    ):
        found, note, cause = gradients_of_step(sent(grads, clips), grads, at_step)
        assert said in (note or cause)

"""The main job on real ranks: the same losses in every layout, what it writes, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tyro")

from core.checkpoint import list_steps
from core.distributed.guard.finite import NonFiniteGradientError
from core_plan.job.config_file import load_config
from core_plan.job.plan import plan_job
from core_plan.machine.launch import find_launch
from core_train.job import build_trainer, job_tokens, run_job, run_steps, start_groups
from core_train.main import main
from core_train.reporter import Reporter
from core_train.trainer import StepResult
from tests.unit_tests.core_train.training_reference import (
    CPU,
    REPLICATED,
    TINY,
    losses_of_a_plain_loop,
    losses_on_ranks,
    read_losses,
    train_on_ranks,
)
from tests.unit_tests.ranks import as_torchrun_starts, ranks, run_on_ranks


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (4, []),  # tp 2 with sequence parallelism, dp 2, sharded, overlapped
        (4, ["--parallel.tp", "1", *REPLICATED]),
        (4, ["--ddp.data-parallel-sharding-strategy", "optim_grads_params"]),
        (4, ["--parallel.sequence-parallel", "False", "--run.micro-batch-size", "1", "--ddp.no-overlap-grad-reduce"]),
        (2, ["--parallel.tp", "1", "--run.micro-batch-size", "2"]),
        (1, ["--parallel.tp", "1", "--run.micro-batch-size", "4"]),
        (4, ["--parallel.tp", "1", "--parallel.pp", "2"]),
        (
            4,
            [
                "--parallel.pp",
                "2",
                "--parallel.schedule",
                "ZBVZeroBubble",
                "--parallel.layers-per-stage",
                "0",
                "1",
                "1",
                "0",
            ],
        ),
    ],
    ids=[
        "tp2-sp-dp2-optim",
        "dp4-no_shard",
        "tp2-sp-dp2-optim_grads_params",
        "tp2-dp2-4micro",
        "dp2-optim-2micro",
        "1rank-2micro",
        "pp2-dp2",
        "tp2-sp-pp2-zbv",
    ],
)
@pytest.mark.in_suite(4)
def test_every_layout_has_the_losses_of_a_plain_loop(
    tmp_path: Path, text_flags: list[str], world: int, flags: list[str]
) -> None:
    common = [*TINY, *text_flags, "--run.steps", "4", "--optimizer.warmup-steps", "2"]
    expected = losses_of_a_plain_loop(load_config([*common, "--parallel.tp", "1"]), 4)
    assert expected[0] - expected[-1] > 0.1, "the losses must move by far more than the bound"
    losses = losses_on_ranks(world, [*common, *flags], tmp_path)
    assert losses == pytest.approx(expected, abs=2e-5, rel=0)


def test_a_run_leaves_its_files(tmp_path: Path, text_flags: list[str]) -> None:
    flags = [*TINY, *text_flags, "--run.steps", "4", "--run.directory", str(tmp_path), "--logging.trace"]
    flags += ["--logging.trackers", "tensorboard", "--run.micro-batch-size", "2"]
    run_on_ranks(train_on_ranks, 4, {"world": 4, "flags": flags})
    directory = tmp_path / "tiny"
    records = [json.loads(text) for text in (directory / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["windows"] for record in records] == [8, 16, 24, 32]
    for record in records:
        assert record["updated"] and 4 < record["loss"] < 6 and record["grad_norm"] > 0
        assert record["bytes_sent"] > 0 and record["collectives"] > 0 and record["exposed_ms"] >= 0
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["steps"] == 4 and 4 < summary["validation_loss"] < 6 and not summary["stopped"]
    assert json.loads((directory / "config.json").read_text())["run"]["name"] == "tiny"
    assert "embedding.word_embeddings.weight" in (directory / "gradients.txt").read_text()
    assert list((directory / "tensorboard").glob("events.out.*"))
    for name in ("loss.png", "buckets.png", "schedule.png"):
        assert_picture_shows_something(directory / name)


def assert_picture_shows_something(path: Path) -> None:
    image = pytest.importorskip("matplotlib.image").imread(path)[..., :3]  # [height, width, rgb]
    assert image.shape[0] > 200 and image.shape[1] > 600
    colors = np.unique((image.reshape(-1, 3) * 255).astype(np.uint8), axis=0)
    coloured = colors[np.ptp(colors.astype(int), axis=1) > 40]
    assert len(coloured) >= 2, f"{path.name} has no coloured line or bar"


@ranks(2)
def test_non_finite_gradients_end_the_run_on_every_rank_and_the_plots_are_drawn(
    rank: int, world: int, tmp_path: Path, text_flags: list[str]
) -> None:
    config = load_config([*TINY, *text_flags, "--parallel.tp", "1"])
    plan = plan_job(config, world)
    start_groups(config, plan)
    trainer = build_trainer(config, plan, job_tokens(config, True), CPU)
    train_step = trainer.train_step

    def spoil_step_3(*, stop_requested: bool) -> StepResult:
        if trainer.step == 2 and rank == 1:
            next(trainer.chunks[0].module.parameters()).data.fill_(float("nan"))
        return train_step(stop_requested=stop_requested)

    trainer.train_step = spoil_step_3  # type: ignore[method-assign]
    reporter = Reporter(config, plan, tmp_path, after_step=0, unit="nats per byte") if rank == 0 else None
    with pytest.raises(NonFiniteGradientError, match="rank 1"):
        run_steps(trainer, reporter)
    if rank == 0:
        assert len(read_losses(tmp_path)) == 2
        assert_picture_shows_something(tmp_path / "loss.png")


def test_a_job_that_does_not_fit_is_refused_by_rank_0_alone_before_any_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 3):
        place = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        started_s = time.monotonic()
        assert main(["--run.global-batch-size", "9"]) == 2
        assert time.monotonic() - started_s < 10
        message = capsys.readouterr().err
        assert ("9 is not divisible by dp (" in message) == (rank == 0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@ranks(2)
def test_no_thread_of_a_group_outlives_the_job(rank: int, world: int, tmp_path: Path, text_flags: list[str]) -> None:
    """One that lets go of its last tensor while the interpreter ends aborts the process, after a run that went well."""
    flags = [*TINY, *text_flags, "--parallel.tp", "1", "--run.directory", str(tmp_path), "--logging.no-plots"]
    config = load_config([*flags, "--run.steps", "2", "--optimizer.warmup-steps", "1"])
    with as_torchrun_starts(rank, world):
        gc.collect()
        before = len(os.listdir("/proc/self/task"))
        launch = find_launch(os.environ)
        assert launch is not None
        assert len(run_job(config, plan_job(config, world), launch).losses) == 2
        assert len(os.listdir("/proc/self/task")) <= before


@ranks(2)
def test_an_interrupt_ends_the_command_cleanly_with_everything_written(
    rank: int, world: int, tmp_path: Path, text_flags: list[str]
) -> None:
    """The ranks' part of the command. That a plain start passes the signal on is a test of test_training_launch.py."""
    flags = [*TINY, *text_flags, "--run.directory", str(tmp_path), "--run.steps", "100000"]
    flags += ["--logging.print-every", "1", "--run.validation-windows", "4"]
    flags += ["--checkpoint.dir", str(tmp_path / "checkpoints")]
    records = tmp_path / "tiny" / "steps.jsonl"

    def interrupt_after_step_2() -> None:
        while not records.exists() or len(records.read_text().splitlines()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_after_step_2, daemon=True).start()
    with as_torchrun_starts(rank, world), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(flags) == 0
    if rank == 0:
        output = printed.getvalue()
        assert "2 ranks = tp 2 with sequence parallelism x dp 1" in output
        assert "exposed" in output and "left" in output
        assert "stopped before step" in output
        assert json.loads((tmp_path / "tiny" / "summary.json").read_text())["stopped"]
        assert list_steps(tmp_path / "checkpoints") == [json.loads(records.read_text().splitlines()[-1])["step"]]
        assert_picture_shows_something(tmp_path / "tiny" / "loss.png")

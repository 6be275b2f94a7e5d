"""torchrun starts the main job again after a rank was killed: it goes on from its last checkpoint by itself."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from tests.unit_tests.core_train.main_job import LAUNCHERS, MainJob
from tests.unit_tests.core_train.training_reference import losses_on_ranks, read_losses, text_flags_in

STEPS = 30
AGAIN = [*LAUNCHERS["torchrun"][:-1], "--max-restarts", "1", LAUNCHERS["torchrun"][-1]]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(7))
def test_a_job_whose_rank_is_killed_at_a_random_moment_ends_with_the_losses_of_an_unbroken_one(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    step, rank = chance.randint(4, STEPS - 5), chance.randint(0, 1)
    asynchronous = ["--checkpoint.async"] if seed % 2 else []
    flags = ["--run.steps", str(STEPS), "--checkpoint.every", "3", "--checkpoint.keep", "2", *asynchronous]
    with MainJob(tmp_path, AGAIN, *flags) as job:
        job.read_until(f"step {step}/")
        os.kill(job.ranks()[rank].pid, signal.SIGKILL)
        went_on = job.read_until("going on after step")
        assert job.rest(120) == 0, job.output
    saved = int(went_on.split()[4])
    assert 0 < saved <= step + 2, went_on  # steps that ended between the line and the kill
    common = ["--config", str(Path(__file__).parents[3] / "configs" / "tiny.toml"), "--run.device", "cpu"]
    unbroken = losses_on_ranks(2, [*common, *text_flags_in(tmp_path / "tokens"), "--run.steps", str(STEPS)], tmp_path)
    assert read_losses(tmp_path / "tiny") == unbroken, "bit for bit"
    assert len(unbroken) == STEPS


@pytest.mark.nightly
def test_a_killed_rank_is_named_in_a_line_and_no_traceback_follows(tmp_path: Path) -> None:
    with MainJob(tmp_path, LAUNCHERS["own"]) as job:
        job.read_until("step 3/")
        os.kill(job.ranks()[1].pid, signal.SIGKILL)
        assert job.rest() == 1, job.output
    assert "rank 1 (process" in job.output and "has ended" in job.output
    assert "error: rank 0 waited" in job.output or "error: rank 0 has waited" in job.output, job.output
    assert "Traceback" not in job.output, job.output

"""How a user ends the main job: Ctrl-C once and twice, a closed terminal, a closed pipe."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from core.checkpoint import list_steps
from tests.unit_tests.core_train.main_job import LAUNCHERS, MainJob, left

# torchrun passes a signal on, waits, and reports the signal as its own failure, whatever the ranks ended with.
STATUS = {"own": 0, "torchrun": 1}
BOTH = [pytest.param("own"), pytest.param("torchrun", marks=pytest.mark.nightly)]


def assert_stopped_with_a_checkpoint(job: MainJob) -> None:
    records = (job.folder / "tiny" / "steps.jsonl").read_text().splitlines()
    assert list_steps(job.checkpoints) == [json.loads(records[-1])["step"]], job.output
    assert json.loads((job.folder / "tiny" / "summary.json").read_text())["stopped"]


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("launcher", BOTH)
def test_a_closed_terminal_or_one_ctrl_c_stops_after_the_step_with_a_checkpoint(
    tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    with MainJob(tmp_path, LAUNCHERS[launcher]) as job:
        job.read_until("step 2/")
        ranks = job.ranks()
        job.process.send_signal(number)
        assert job.rest() == STATUS[launcher], job.output
        assert_stopped_with_a_checkpoint(job)
        assert not list(left(ranks, 0.0))


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_closed_pipe_stops_after_the_step_with_a_checkpoint(tmp_path: Path, launcher: str) -> None:
    with (tmp_path / "errors").open("w") as errors, MainJob(tmp_path, LAUNCHERS[launcher], stderr=errors) as job:
        job.read_until("step 2/")
        assert job.process.stdout is not None
        job.process.stdout.close()
        assert job.process.wait(60) == 0, (tmp_path / "errors").read_text()
        assert_stopped_with_a_checkpoint(job)
        assert "BrokenPipe" not in (tmp_path / "errors").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_second_ctrl_c_ends_everything_where_a_rank_is_stopped_and_the_other_waits(
    tmp_path: Path, launcher: str
) -> None:
    with MainJob(tmp_path, LAUNCHERS[launcher]) as job:
        job.read_until("step 2/")
        ranks = job.ranks()
        assert len(ranks) == 2
        os.kill(ranks[1].pid, signal.SIGSTOP)
        time.sleep(1.0)
        job.process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert len(list(left(ranks, 0.0))) == 2, "the step cannot end, so the first one is not enough"
        job.process.send_signal(signal.SIGINT)
        assert not list(left(ranks, 5.0))
        job.process.wait(5.0)
        assert job.process.returncode == (130 if launcher == "own" else 1)

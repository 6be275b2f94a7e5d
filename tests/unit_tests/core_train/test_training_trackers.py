"""Trackers get every number of every step, and a run that goes on goes on in the tracker's own run."""

from __future__ import annotations

import sys
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.extras import MissingExtra
from core_plan.job.config import JobConfig
from core_plan.job.config_file import load_config
from core_train.main import check_extras
from core_train.step_log import StepLog, StepRecord
from core_train.trackers import TRACKERS
from tests.unit_tests.core_train.test_training_display import record

CONFIG = {"run": {"name": "tiny", "steps": 3}}
NO_SCALARS = {"step", "slow_ranks", "validation_loss"}
SCALARS = {field.name for field in fields(StepRecord)} - NO_SCALARS


def run_with(name: str, directory: Path, steps: range, after_step: int = 0) -> None:
    log = StepLog(directory, [TRACKERS[name](directory, CONFIG, after_step)], after_step)
    for step in steps:
        log.add(record(step))
    log.close()


def expected(step: int) -> dict[str, float]:
    numbers = asdict(record(step))
    return {name: float(numbers[name]) for name in SCALARS if numbers[name] is not None}


def test_tensorboard_has_every_number_of_every_step(tmp_path: Path) -> None:
    run_with("tensorboard", tmp_path, range(1, 4))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(expected(1))
    for name in expected(1):
        assert [(event.step, event.value) for event in events.Scalars(name)] == [
            (step, pytest.approx(expected(step)[name], rel=1e-6)) for step in (1, 2, 3)
        ]


class FakeRuns:
    """What wandb and mlflow have in common: runs by id, and what was logged to each."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, int, dict[str, float]]] = []
        self.started: list[dict[str, Any]] = []
        self.ended = 0

    def end(self) -> None:
        self.ended += 1


def test_weights_and_biases_goes_on_in_the_run_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = FakeRuns()

    def init(**options: Any) -> Any:
        runs.started.append(options)
        identity = options.get("id", f"run-{len(runs.started)}")
        return SimpleNamespace(
            id=identity, log=lambda values, step: runs.logged.append((identity, step, values)), finish=runs.end
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run_with("wandb", tmp_path, range(1, 3))
    run_with("wandb", tmp_path, range(3, 4), after_step=2)
    assert runs.logged == [("run-1", step, expected(step)) for step in (1, 2, 3)]
    assert runs.started[0]["config"] == CONFIG and runs.started[1]["resume"] == "allow" and runs.ended == 2
    run_with("wandb", tmp_path, range(1, 2))
    assert runs.logged[-1][0] == "run-3", "a run that begins anew is another one"


def test_mlflow_goes_on_in_the_run_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, params = FakeRuns(), []

    def start_run(run_id: str | None, run_name: str | None) -> Any:
        runs.started.append({"run_id": run_id, "run_name": run_name})
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or f"run-{len(runs.started)}"))

    def log_metrics(values: dict[str, float], step: int, run_id: str) -> None:
        runs.logged.append((run_id, step, values))

    fake = SimpleNamespace(start_run=start_run, log_metrics=log_metrics, log_params=params.append, end_run=runs.end)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    run_with("mlflow", tmp_path, range(1, 3))
    run_with("mlflow", tmp_path, range(3, 4), after_step=2)
    assert runs.logged == [("run-1", step, expected(step)) for step in (1, 2, 3)]
    assert params == [{"run.name": "tiny", "run.steps": 3}] and runs.ended == 2
    assert runs.started[1] == {"run_id": "run-1", "run_name": None}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused_before_ranks_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None if package == name else package)
    config = load_config(["--logging.trackers", name, "--logging.no-plots"])
    assert config.logging.trackers == (name,) and JobConfig().logging.trackers == ()
    with pytest.raises(MissingExtra, match=rf"--logging.trackers {name} needs .*gradient-core\[trackers\]"):
        check_extras(config)

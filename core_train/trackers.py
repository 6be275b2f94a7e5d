"""Trackers: programs that show the numbers of many runs, behind one small interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from core.extras import require, require_installed

Config = Mapping[str, Any]  # options of a job, as nested dictionaries


class Tracker(Protocol):
    """Receiver of every step's numbers. Your own tracker needs these two methods, and a row in TRACKERS."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of a step (from 1), by their names in steps.jsonl; absent numbers are left out."""

    def close(self) -> None:
        """The run has ended."""


class TensorBoard:
    """Event files in the directory ``tensorboard`` of the run."""

    def __init__(self, directory: Path, config: Config, after_step: int) -> None:
        module = require("torch.utils.tensorboard", flag_of("tensorboard"))
        self.writer = module.SummaryWriter(str(directory / "tensorboard"), purge_step=after_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Weights & Biases run, configured by its environment variables (WANDB_PROJECT, WANDB_MODE, ...)."""

    def __init__(self, directory: Path, config: Config, after_step: int) -> None:
        wandb = require("wandb", flag_of("wandb"), "trackers")
        again = {"id": kept, "resume": "allow"} if after_step and (kept := _kept(directory / "wandb_run")) else {}
        self.run = wandb.init(dir=str(directory), name=directory.name, config=dict(config), **again)
        (directory / "wandb_run").write_text(self.run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """MLflow run, configured by its environment variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...)."""

    def __init__(self, directory: Path, config: Config, after_step: int) -> None:
        mlflow = require("mlflow", flag_of("mlflow"), "trackers")
        kept = _kept(directory / "mlflow_run") if after_step else None
        self.mlflow = mlflow
        self.run = mlflow.start_run(run_id=kept, run_name=None if kept else directory.name)
        (directory / "mlflow_run").write_text(self.run.info.run_id)
        if kept is None:
            mlflow.log_params(
                {f"{section}.{name}": value for section, options in config.items() for name, value in options.items()}
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(values), step=step, run_id=self.run.info.run_id)

    def close(self) -> None:
        self.mlflow.end_run()


TRACKERS: dict[str, Callable[[Path, Config, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def check_tracker(name: str) -> None:
    """Raise MissingExtra if the tracker's package is not installed, before anything runs."""
    require_installed(name, flag_of(name), "train" if name == "tensorboard" else "trackers")


def flag_of(name: str) -> str:
    """The option that turns the tracker on."""
    return f"--logging.trackers {name}"


def _kept(path: Path) -> str | None:
    return path.read_text().strip() if path.is_file() else None

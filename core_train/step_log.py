"""Every step's numbers, to a JSONL file and to trackers. Written by rank 0 alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from core_plan.job.run_directory import RunDisk
from core_train.trackers import Tracker


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of steps.jsonl. Communication figures cover rank 0's gradient reductions."""

    step: int  # from 1
    loss: float  # nats per byte, mean over the whole global batch, before the update
    grad_norm: float | None  # over all parameters, before clipping; None when the update was skipped
    lr: float
    loss_scale: float
    updated: bool
    step_ms: float
    tokens_per_s: float
    exposed_ms: float  # time that the step waited for gradient communication
    hidden_share: float  # share of the collectives' time in flight that no rank waited for
    bytes_sent: int
    collectives: int
    windows: int  # consumed since the start
    elapsed_s: float  # since the first step began
    validation_loss: float | None = None  # nats per byte, after the update; None where it was not taken
    mfu: float | None = None  # share over all devices; None if their peak is unknown
    slow_ranks: tuple[int, ...] = ()  # stragglers, as the rank watch names them


def read_records(path: Path) -> list[StepRecord]:
    """Read the records of a steps.jsonl; none if there is no file. A line cut by a crash ends them."""
    records: list[StepRecord] = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            records.append(StepRecord(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return records


class StepLog:
    """Keeps the records, and writes each as soon as it comes. A context manager: closes its files."""

    def __init__(self, directory: Path, trackers: Sequence[Tracker] = (), after_step: int = 0) -> None:
        """after_step: the step that the run resumes from; the file's records up to it stay, later ones do not."""
        self.disk = RunDisk(directory)
        path = directory / "steps.jsonl"
        self.records = [record for record in read_records(path) if record.step <= after_step]
        self.trackers = trackers
        self._file: TextIO | None = None
        with self.disk.forgiven():
            self._file = path.open("w", buffering=1)  # line buffered: readable while running
        for record in self.records:
            self._write(record)

    def _write(self, record: StepRecord) -> None:
        if self._file is not None:
            with self.disk.forgiven():
                self._file.write(json.dumps(asdict(record)) + "\n")

    def add(self, record: StepRecord) -> None:
        """Write one step."""
        self.records.append(record)
        self._write(record)
        numbers = asdict(record)
        values = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        del values["step"]
        for tracker in self.trackers:
            with self.disk.forgiven():
                tracker.log(record.step, values)

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._file, *self.trackers):
            if file is not None:
                with self.disk.forgiven():
                    file.close()

"""Every step's numbers: a JSONL file, trackers, and a printed line. Rank 0 writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from core_plan.job.run_directory import RunDisk
from core_train.trackers import Tracker

RECENT = 20  # steps whose median time predicts the remaining time


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


def line(records: Sequence[StepRecord], steps: int) -> str:
    """Return 'step 20/300  loss 2.914  |g| 0.52  81,920 tokens/s  exposed 3.1 ms  0:42 left' for the last record."""
    record = records[-1]
    recent = sorted(each.step_ms for each in records[-RECENT:])
    left = duration(recent[len(recent) // 2] * (steps - record.step) / 1e3)
    norm = "skipped" if record.grad_norm is None else f"{record.grad_norm:.2f}"
    mfu = "" if record.mfu is None else f"MFU {record.mfu:.1%}  "
    validation = "" if record.validation_loss is None else f"  validation {record.validation_loss:.3f}"
    return (
        f"step {record.step}/{steps}  loss {record.loss:.3f}{validation}  |g| {norm}  "
        f"{record.tokens_per_s:,.0f} tokens/s  {mfu}exposed {record.exposed_ms:.1f} ms  {left} left"
    )


def duration(seconds: float) -> str:
    """'0:42', '12:05', '3:07:00'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


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
    """Keeps the records, and writes each as soon as it comes."""

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

    def close(self) -> None:
        """Close the file and the trackers."""
        for file in (self._file, *self.trackers):
            if file is not None:
                with self.disk.forgiven():
                    file.close()

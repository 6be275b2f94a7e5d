"""The one line that rank 0 shows: live on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from core.extras import require
from core_train.step_log import StepRecord

RECENT = 20  # steps that the remaining time is judged by


def make_progress(steps: int, print_every: int, stream: TextIO | None = None) -> PlainLines | LiveLine:
    """A live line where `stream` (standard output) is a terminal and rich is installed, else plain lines."""
    stream = stream or sys.stdout
    if stream.isatty():
        try:
            return LiveLine(steps)
        except ImportError:
            pass
    return PlainLines(steps, print_every, stream)


def line(record: StepRecord, steps: int, remaining_s: float) -> str:
    """'step 20/300  loss 2.914  |g| 0.52  81,920 tokens/s  exposed 3.1 ms  0:42 left'."""
    norm = "skipped" if record.grad_norm is None else f"{record.grad_norm:.2f}"
    mfu = "" if record.mfu is None else f"MFU {record.mfu:.1%}  "
    validation = "" if record.validation_loss is None else f"  validation {record.validation_loss:.3f}"
    return (
        f"step {record.step}/{steps}  loss {record.loss:.3f}{validation}  |g| {norm}  "
        f"{record.tokens_per_s:,.0f} tokens/s  {mfu}exposed {record.exposed_ms:.1f} ms  {duration(remaining_s)} left"
    )


def duration(seconds: float) -> str:
    """'0:42', '12:05', '3:07:00'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class RemainingTime:
    """The rest of the run, judged by the last steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.recent_ms: list[float] = []

    def after(self, record: StepRecord) -> float:
        """Seconds left after this step."""
        self.recent_ms = [*self.recent_ms[1 - RECENT :], record.step_ms]
        ordered = sorted(self.recent_ms)
        return ordered[len(ordered) // 2] * (self.steps - record.step) / 1e3


class PlainLines:
    """A line for the first, the last and every `print_every`-th step, and for those with a validation loss."""

    def __init__(self, steps: int, print_every: int, stream: TextIO) -> None:
        self.steps = steps
        self.print_every = print_every
        self.stream = stream
        self.remaining = RemainingTime(steps)

    def show(self, record: StepRecord) -> None:
        """Print the step if it is due."""
        remaining_s = self.remaining.after(record)
        is_due = record.step in (1, self.steps) or record.step % self.print_every == 0
        if is_due or record.validation_loss is not None:
            print(line(record, self.steps, remaining_s), file=self.stream, flush=True)

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


class LiveLine:
    """A progress bar and the latest step's numbers, redrawn in place by rich."""

    def __init__(self, steps: int) -> None:
        progress = require("rich.progress", "the live progress line")
        self.steps = steps
        self.remaining = RemainingTime(steps)
        self.bar: Any = progress.Progress(
            progress.BarColumn(bar_width=20), progress.TextColumn("{task.description}"), refresh_per_second=5
        )
        self.task = self.bar.add_task("", total=steps)

    def show(self, record: StepRecord) -> None:
        """Redraw with this step's numbers."""
        text = line(record, self.steps, self.remaining.after(record))
        self.bar.update(self.task, completed=record.step, description=text)

    def __enter__(self) -> LiveLine:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

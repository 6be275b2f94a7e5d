"""Reporter: rank 0's output while a job runs, and its files in the run's directory."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from core import parallel_state
from core_plan.job.config import JobConfig
from core_plan.job.plan import JobPlan
from core_train.mfu import peak_of
from core_train.plots import draw_bucket_timeline, draw_loss_curve, draw_schedule
from core_train.step_log import StepLog, StepRecord, line
from core_train.step_trace import StepTrace
from core_train.trackers import TRACKERS
from core_train.trainer import StepResult, Trainer

GENERATE = "continue a text: {python} -m core generate {directory}"


class Reporter:
    """A context manager around the steps of a run; draws the plots when it ends, however it ends."""

    def __init__(self, config: JobConfig, plan: JobPlan, directory: Path, after_step: int, unit: str) -> None:
        self.unit = unit  # unit of the losses
        self.config = config
        self.plan = plan
        self.directory = directory
        self.after_step = after_step  # last step before a resumed run
        trackers = [TRACKERS[name](directory, asdict(config), after_step) for name in config.logging.trackers]
        self.log = StepLog(directory, trackers, after_step)
        self.disk = self.log.disk
        self.validation_loss: float | None = None
        self.kept: Path | None = None  # path of the run's last checkpoint
        self.last_trace: StepTrace | None = None
        self.started_s = time.perf_counter()
        self.step_started_s = self.step_ended_s = self.started_s

    def end_step(self) -> None:
        """End the timing of a step; time until it is shown does not count."""
        self.step_ended_s = time.perf_counter()

    def show_step(self, result: StepResult, trainer: Trainer, validation_loss: float | None = None) -> None:
        """Log and show the step that ``end_step`` has ended."""
        ended_s = self.step_ended_s
        step_s = ended_s - self.step_started_s
        self.step_started_s = time.perf_counter()
        report = trainer.chunks[0].step_report()
        tokens_per_s = self.plan.tokens_per_step / step_s
        peak = peak_of(trainer.device, self.config.model.dtype, self.config.logging.peak_tflops)
        mfu = None
        if peak is not None:
            mfu = trainer.flops_per_token * tokens_per_s / (self.plan.world_size * peak * 1e12)
        watch = parallel_state.get_rank_watch()
        record = StepRecord(
            step=trainer.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            loss_scale=result.loss_scale,
            updated=result.updated,
            step_ms=1e3 * step_s,
            tokens_per_s=tokens_per_s,
            exposed_ms=report.exposed_ms,
            hidden_share=report.hidden_share,
            bytes_sent=report.bytes_sent,
            collectives=report.collectives,
            windows=trainer.sampler.consumed,
            elapsed_s=ended_s - self.started_s,
            validation_loss=validation_loss,
            mfu=mfu,
            slow_ranks=() if watch is None else tuple(sorted(watch.stragglers.slow)),
        )
        self.last_trace = result.trace
        self.log.add(record)
        last_step = self.config.run.last_step
        is_due = trainer.step in (1, last_step) or trainer.step % self.config.logging.print_every == 0
        if is_due or validation_loss is not None:
            print(line(self.log.records, last_step), flush=True)

    def show_end(self, validation_loss: float | None, traces: Sequence[StepTrace], *, stopped: bool) -> None:
        """Write the summary of a run that has ended, or was stopped."""
        self.validation_loss = validation_loss
        if traces and self.config.logging.plots:
            with self.disk.forgiven():
                draw_schedule(self.directory / "schedule.png", traces)
        records = self.log.records
        summary = {
            "steps": records[-1].step if records else 0,
            "stopped": stopped,
            "first_loss": records[0].loss if records else None,
            "last_loss": records[-1].loss if records else None,
            "validation_loss": validation_loss,
            "seconds": self._seconds(),
        }
        with self.disk.forgiven():
            (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    def __enter__(self) -> Reporter:
        self.started_s = self.step_started_s = self.step_ended_s = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.log.close()
        records = self.log.records
        if records:
            print(self._last_words(ended_by=kind))
        if self.kept is not None and kind is None:
            print(self._what_next(self.kept), flush=True)
        if records and self.config.logging.plots:
            with self.disk.forgiven():
                draw_loss_curve(self.directory / "loss.png", records, self.validation_loss, self.unit)
                if self.last_trace is not None:
                    self.last_trace.settle()
                    draw_bucket_timeline(self.directory / "buckets.png", self.last_trace)

    def _seconds(self) -> float:
        """Return the time of this run's steps, without those before it was resumed."""
        records = self.log.records
        return records[-1].elapsed_s if records and records[-1].step > self.after_step else 0.0

    def _last_words(self, ended_by: type[BaseException] | None) -> str:
        last = self.log.records[-1]
        done = last.step - self.after_step
        words = f"{done} steps in {self._seconds():.1f} s; training loss {last.loss:.4f} {self.unit}"
        if self.validation_loss is not None:
            words += f", validation loss {self.validation_loss:.4f}"
        if ended_by is not None:
            words += f"; ended by {ended_by.__name__}"
        elif last.step < self.config.run.last_step:
            words += f"; stopped before step {last.step + 1} of {self.config.run.last_step}"
        return words

    def _what_next(self, kept: Path) -> str:
        """Return commands that use the checkpoint."""
        longer = ""
        if self.log.records and self.log.records[-1].step >= self.config.run.steps:
            longer = f" --checkpoint.schedule given --run.steps {2 * self.config.run.steps}"
        place = shlex.quote(str(kept))
        then = GENERATE.format(python=shlex.quote(python_command()), directory=shlex.quote(str(self.directory)))
        return f"kept in {kept}/; to train on, add: --checkpoint.dir {place} --checkpoint.resume{longer}\n{then}"


def python_command() -> str:
    """Return this interpreter's command: ``python`` if it is the one on the path, else its path."""
    found = shutil.which("python")
    if found is not None and os.path.abspath(found) == os.path.abspath(sys.executable):
        return "python"
    below = os.path.relpath(sys.executable)
    return sys.executable if below.startswith(os.pardir) else below

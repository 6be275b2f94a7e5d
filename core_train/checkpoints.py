"""Checkpoints of a job: when they are saved, their content, and the checks when a run resumes."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from core.checkpoint import (
    CheckpointError,
    CheckpointNotFound,
    CheckpointSaver,
    find_intact,
    load_checkpoint,
    save_checkpoint,
)
from core_plan.job.errors import ConfigError
from core_train.checkpoint_options import BEST, as_json, compare_configurations
from core_train.trainer import Trainer


class JobCheckpoints:
    """The checkpoints of one run. Every rank makes one and calls its methods together; a context manager.

    Raises CheckpointError, the same on every rank, when a save fails: training ends, the last checkpoint is intact.
    """

    def __init__(self, trainer: Trainer, root: Path) -> None:
        self.config = trainer.config
        self.trainer = trainer
        self.root = root
        # Ranks on devices agree on files through their CPUs.
        self.group = dist.new_group(backend="gloo") if trainer.device.type == "cuda" else None
        self.saved_step = -1
        self.run: str | None = None  # the name of the run's directory, from the checkpoint of a resumed run
        self.savers: list[CheckpointSaver] = []  # one for `root`, and with keep_best one for its folder BEST
        self.best_step, self.best_loss = 0, math.inf  # used with keep_best
        self.open_savers = contextlib.ExitStack()

    def resume(self) -> str:
        """Restore model, optimizer, scheduler, loss scale, random streams and the position in the data.

        Returns:
            A sentence that says where the run continues, or that it begins because there is no checkpoint.

        Raises:
            ConfigError: If the checkpoint does not fit this run.
        """
        trainer, options = self.trainer, self.config.checkpoint
        try:
            with warnings.catch_warnings():  # what was damaged is in the report, and so in the sentence below
                warnings.filterwarnings("ignore", message="Checkpoint of step .* is damaged", category=RuntimeWarning)
                report = load_checkpoint(
                    self.root,
                    trainer.chunks,
                    trainer.optimizer,
                    trainer.scheduler,
                    step=options.step,
                    group=self.group,
                )
        except CheckpointNotFound:
            if options.step is not None:
                raise ConfigError(f"--checkpoint.step {options.step}: there is no such step in {self.root}") from None
            return f"no checkpoint in {self.root}: the run begins"
        except (CheckpointError, ValueError) as error:
            raise ConfigError(str(error)) from error
        notes = compare_configurations(report.configuration, as_json(self.config))
        text, sampler, self.run = kept_of(report.extra, report.path, "text", "sampler", "run")
        check_text(text, self._text())
        try:
            trainer.sampler.load_state_dict(sampler)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        trainer.step = self.saved_step = report.step
        if not report.random_restored:
            notes.append(
                "random streams start again, since they belong to another layout (only dropout draws from them)"
            )
        going_on = "; ".join([f"going on after step {report.step} from {report.path}", *notes])
        return " ".join([*report.skipped, going_on])

    def step_edge(self) -> None:
        """Look how saves in flight have fared after a step, and save if it is time."""
        for saver in self.savers:
            saver.step_edge()
        every = self.config.checkpoint.every
        if every is not None and self.trainer.step % every == 0:
            self.save()

    def save(self) -> None:
        """Save the step that has just been done, unless it is saved already."""
        if self.saved_step != self.trainer.step:
            self._save_by(self.savers[0])
            self.saved_step = self.trainer.step

    def saw_validation(self, loss: float | None) -> None:
        """With keep_best, save this step in BEST if its validation loss is the lowest so far."""
        if loss is not None and self.config.checkpoint.keep_best and loss < self.best_loss:
            self.best_step, self.best_loss = self.trainer.step, loss
            self._save_by(self.savers[1], validation_loss=loss)

    def _save_by(self, saver: CheckpointSaver, **extra: Any) -> None:
        trainer = self.trainer
        save_checkpoint(
            saver.root.path,
            trainer.step,
            trainer.chunks,
            trainer.optimizer,
            trainer.scheduler,
            extra={"sampler": trainer.sampler.state_dict(), "text": self._text(), "run": self.run, **extra},
            configuration=as_json(self.config),
            group=self.group,
            saver=saver,
        )

    def _text(self) -> dict[str, Any]:
        return asdict(self.trainer.tokens.header)

    def __enter__(self) -> JobCheckpoints:
        options, group, best = self.config.checkpoint, self.group, self.root / BEST
        if options.keep_best and self.trainer.step > 0:  # a resumed run compares with the best before
            with contextlib.suppress(CheckpointNotFound):
                found = find_intact(best, group=group)
                (loss,) = kept_of(found.meta.get("extra", {}), found.path, "validation_loss")
                self.best_step, self.best_loss = found.step, float(loss)
        with contextlib.ExitStack() as opened:
            # A better checkpoint is complete on disk before the one before it is deleted.
            for root, keep in [(self.root, options.keep), (best, 1)][: 1 + options.keep_best]:
                saver = CheckpointSaver(root, group, keep_last=keep, asynchronous=options.asynchronous)
                self.savers.append(opened.enter_context(saver))
            self.open_savers = opened.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.open_savers.__exit__(*raised)


def kept_of(extra: Mapping[str, Any], path: Path, *names: str) -> list[Any]:
    """Return the job's values in a checkpoint's ``extra``.

    Raises:
        ConfigError: If another program saved it.
    """
    missing = [name for name in names if name not in extra]
    if missing:
        raise ConfigError(
            f"{path} was not saved by this job, so it cannot be resumed: its manifest lacks "
            f"{' and '.join(map(repr, missing))} under 'extra'. Start a new run with another --checkpoint.dir"
        )
    return [extra[name] for name in names]


def check_text(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError if the saved position in the data refers to other tokens."""
    if saved["digest"] == now["digest"]:
        return
    then, here = (f"{text['text']} ({text['tokens']:,} tokens, digest {text['digest'][:12]})" for text in (saved, now))
    raise ConfigError(
        f"the checkpoint was saved while training on {then}, and this run's text is {here}; give the same --data.text "
        "and --data.tokenizer, or begin another run in another --checkpoint.dir"
    )

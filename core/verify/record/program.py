"""`python -m core verify --record FILE train.py ARGS`: record the steps of a program that does not import this package.

The recorded model is the first module that is called in training mode and that no other module calls, or the first
pipeline that runs. The optimizer is the first one that steps one of its parameters.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from core.optimizer.optimizer import MegatronOptimizer
from core.pipeline_parallel import PipelineRunner
from core.verify.asked import Asked, execute
from core.verify.record.recorder import StepRecording


def record_program(asked: Asked) -> int:
    """Run a program, record its steps, and return the program's exit status.

    Returns:
        The status; 1 if the program has made no step, 2 if there is no program.
    """
    watch = _ProgramRecording(asked)
    with ExitStack() as stack:
        stack.callback(watch.close)
        for owner, name in ((nn.Module, "__call__"), (PipelineRunner, "step")):
            patch = mock.patch.object(owner, name, watch.finding_model(getattr(owner, name)))
            watch.finding.enter_context(patch)
        step = watch.recording_step(MegatronOptimizer.step)
        stack.enter_context(mock.patch.object(MegatronOptimizer, "step", step))
        stack.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: watch.before(optimizer)).remove)
        stack.callback(register_optimizer_step_post_hook(lambda optimizer, *_: watch.after(optimizer)).remove)
        status = execute(asked)
    if status != 0:
        return status
    if watch.recording is None or not watch.recording.steps:
        print(
            "python -m core verify --record: no step is recorded in this process; a step is a forward of a model in "
            "training mode, its backward, and the step of an optimizer of its parameters",
            file=sys.stderr,
        )
        return 1
    return 0 if not watch.recording.failure else 1


class _ProgramRecording:
    """Finds the model and the optimizer of a running program, and records them."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.recording: StepRecording | None = None
        self.optimizer: Any = None
        self.depth = 0
        self.finding = ExitStack()  # patches that find the model

    def close(self) -> None:
        """Remove all hooks, and close the file."""
        self.finding.close()
        if self.recording is not None:
            self.recording.close()

    def finding_model(self, call: Any) -> Any:
        """Wrap a call of a module or pipeline: the first outermost one that trains is recorded."""

        def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.depth and self.recording is None and _is_trained(model):
                self.finding.close()
                assert self.asked.record is not None, "the option of this command"
                self.recording = StepRecording(model, self.asked.record, every=self.asked.every)
            self.depth += 1
            try:
                return call(model, *args, **kwargs)
            finally:
                self.depth -= 1

        return watched

    def recording_step(self, step: Any) -> Any:
        """Wrap the step of our optimizer, which has no hooks."""

        def recorded(optimizer: MegatronOptimizer, *args: Any, **kwargs: Any) -> Any:
            self.before(optimizer)
            result = step(optimizer, *args, **kwargs)
            self.after(optimizer)
            return result

        return recorded

    def before(self, optimizer: Any) -> None:
        """Choose the optimizer of the recorded model, and sketch the gradients."""
        if self.recording is None:
            return
        if self.optimizer is None:
            job = self.recording.torch_job
            if job is None:
                is_mine = self.recording.model.chunks[0] in getattr(optimizer, "model_chunks", ())
            else:
                mine = {id(param) for param in job.torch_model.params.values()}
                is_mine = any(id(param) in mine for group in optimizer.param_groups for param in group["params"])
            self.optimizer = optimizer if is_mine else None
        if self.optimizer is optimizer:
            self.recording.before_update(optimizer)

    def after(self, optimizer: Any) -> None:
        """Sketch the weights, and write the step."""
        if self.recording is not None and self.optimizer is optimizer:
            self.recording.after_update()


def _is_trained(model: Any) -> bool:
    if isinstance(model, PipelineRunner):
        return True
    is_training: bool = model.training and torch.is_grad_enabled()
    return is_training and any(param.requires_grad for param in model.parameters())

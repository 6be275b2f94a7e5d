"""`python -m core verify --record FILE train.py ARGS`: record the steps of a program that does not import this package.

The recorded model is the first module that is called in training mode and that no other module calls, or the first
pipeline that runs. The optimizer is the first one that steps one of its parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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

    Args:
        asked: The options, with the file to write.

    Returns:
        The status; 1 if the program has made no step, 2 if there is no program.
    """
    watch = _ProgramRecording(asked)
    with watch.active():
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
        self.looking = ExitStack()  # for the model

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record the program that runs inside the context."""
        with ExitStack() as stack:
            stack.callback(self.close)
            for owner, name, found in (
                (nn.Module, "__call__", self._is_trained),
                (PipelineRunner, "step", lambda _: True),
            ):
                patch = mock.patch.object(owner, name, self._watched(getattr(owner, name), found))
                self.looking.enter_context(patch)
            step = MegatronOptimizer.step

            def recorded(optimizer: MegatronOptimizer, *args: Any, **kwargs: Any) -> Any:
                self._before(optimizer)
                result = step(optimizer, *args, **kwargs)
                self._after(optimizer)
                return result

            stack.enter_context(mock.patch.object(MegatronOptimizer, "step", recorded))
            stack.callback(register_optimizer_step_pre_hook(lambda each, *_: self._before(each)).remove)
            stack.callback(register_optimizer_step_post_hook(lambda each, *_: self._after(each)).remove)
            yield

    def close(self) -> None:
        """Remove all hooks, and close the file."""
        self.looking.close()
        if self.recording is not None:
            self.recording.close()

    def _watched(self, call: Callable[..., Any], found: Callable[[Any], bool]) -> Callable[..., Any]:
        def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.depth and self.recording is None and found(model):
                self.looking.close()
                assert self.asked.record is not None, "the option of this command"
                self.recording = StepRecording(model, self.asked.record, every=self.asked.every)
            self.depth += 1
            try:
                return call(model, *args, **kwargs)
            finally:
                self.depth -= 1

        return watched

    @staticmethod
    def _is_trained(model: nn.Module) -> bool:
        return model.training and torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())

    def _before(self, optimizer: Any) -> None:
        """Choose the optimizer of the recorded model, and sketch the gradients."""
        if self.recording is None:
            return
        if self.optimizer is None:
            chunks = getattr(optimizer, "model_chunks", None)
            if chunks is None and self.recording.torch_job is not None:
                mine = {id(param) for param in self.recording.torch_job.torch_model.params.values()}
                stepped: Sequence[Any] = [param for group in optimizer.param_groups for param in group["params"]]
                self.optimizer = optimizer if any(id(param) in mine for param in stepped) else None
            elif chunks is not None and self.recording.torch_job is None:
                self.optimizer = optimizer if self.recording.model.chunks[0] in chunks else None
        if self.optimizer is optimizer:
            self.recording.before_update(optimizer)

    def _after(self, optimizer: Any) -> None:
        if self.recording is not None and self.optimizer is optimizer:
            self.recording.after_update()

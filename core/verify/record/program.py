"""``python -m core verify --record FILE train.py ARGS``: record the steps of a program that does not import this
package.

The recorded model is the first module that is called in training mode and that no other module calls, or the first
pipeline that runs. The optimizer is one that holds its parameters before that call.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import nn

from core.pipeline_parallel import PipelineRunner
from core.verify.also_seen import optimizers_alive, params_of
from core.verify.asked import Asked, execute
from core.verify.record.recorder import StepRecording, record_with


def record_program(asked: Asked) -> int:
    """Run a program, record its steps, and return the program's exit status.

    Returns:
        The status; 1 if the program has made no step, 2 if there is no program.
    """
    recordings: list[StepRecording] = []
    depth = 0

    def finding_model(call: Any) -> Any:
        """Wrap a call of a module or pipeline: the first outermost one that trains is recorded."""

        def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if not depth and not recordings and _is_trained(model) and (optimizer := _optimizer_of(model)) is not None:
                patches.close()
                assert asked.record is not None, "the option of this command"
                recordings.append(record_with(model, optimizer, asked.record, every=asked.every))
            depth += 1
            try:
                return call(model, *args, **kwargs)
            finally:
                depth -= 1

        return watched

    with ExitStack() as patches:
        for owner, name in ((nn.Module, "__call__"), (PipelineRunner, "step")):
            patches.enter_context(mock.patch.object(owner, name, finding_model(getattr(owner, name))))
        status = execute(asked)
    for recording in recordings:
        recording.close()
    if status != 0:
        return status
    if not any(recording.steps for recording in recordings):
        print(
            "python -m core verify --record: no step is recorded in this process; a step is a forward of a model in "
            "training mode, its backward, and the step of an optimizer of its parameters",
            file=sys.stderr,
        )
        return 1
    return int(any(recording.failure for recording in recordings))


def _optimizer_of(model: Any) -> Any:
    """Return an optimizer that holds a parameter of a model or pipeline; None if there is none."""
    chunks = model.chunks if isinstance(model, PipelineRunner) else [model]
    mine = {id(param) for chunk in chunks for param in chunk.parameters()}
    return next((each for each in optimizers_alive() if any(id(param) in mine for param in params_of(each))), None)


def _is_trained(model: Any) -> bool:
    if isinstance(model, PipelineRunner):
        return True
    is_training: bool = model.training and torch.is_grad_enabled()
    return is_training and any(param.requires_grad for param in model.parameters())

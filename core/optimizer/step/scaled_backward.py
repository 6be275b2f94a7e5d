"""Detection of gradients from an unscaled loss, before a step divides them by the loss scale.

All gradients of a step have the same loss scale, which is divided out once, at the end of the step. Every backward must
therefore start at a loss that was multiplied by it. A hook on each scaled loss records its backward. A gradient that
arrives while no such backward runs is rejected, with its parameter's name.

Two kinds of programs may be correct without recorded backwards, and are not checked. Some read the scale before their
first step, to multiply losses by hand. In others a scaled loss reaches no parameter, because they pass its gradients on
(embeddings that are computed in parts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.grad_attribute import backward_runs, call_after_backward
from core.optimizer.loss_scaler import LossScaler


class _Backward:
    """Running backward of a scaled loss."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self.scale = scaler.value
        self.has_arrived = False  # True after it has reached a watched parameter


_RUNNING: list[_Backward] = []  # one list per process, because one loss may train the models of several optimizers


def scale_loss(loss: torch.Tensor, scaler: LossScaler) -> torch.Tensor:
    """Multiply a loss by the loss scale, and record its backward when it runs."""
    scaled = loss * scaler.value
    if scaled.requires_grad:
        scaler.has_scaled = True
        if _RUNNING and not backward_runs():
            _RUNNING.clear()  # remove failed backwards
        scaled.register_hook(partial(_begin, scaler))
    return scaled


def _begin(scaler: LossScaler, _: torch.Tensor) -> None:
    running = _Backward(scaler)
    _RUNNING.append(running)
    call_after_backward(partial(_end, running))


def _end(running: _Backward) -> None:
    if running in _RUNNING:
        _RUNNING.remove(running)
    if not running.has_arrived:
        running.scaler.is_passed_on = True


@contextmanager
def scaled_backward(scaler: LossScaler | None) -> Iterator[None]:
    """Mark a block as a backward from gradients that already have the loss scale, such as another rank's."""
    if scaler is None:
        yield
        return
    running = _Backward(scaler)
    _RUNNING.append(running)
    try:
        yield
    finally:
        if running in _RUNNING:
            _RUNNING.remove(running)


def lacks_scale(scaler: LossScaler | None) -> bool:
    """Return ``True`` if a gradient that arrives now comes from a backward that did not start at a scaled loss."""
    if scaler is None or scaler.value == 1.0:
        return False
    for running in _RUNNING:
        if running.scale == scaler.value:
            running.has_arrived = True
            return False
    return not scaler.is_by_hand and backward_runs()


def unscaled(what: str, scaler: LossScaler) -> str:
    """Return the error text for a gradient, described by ``what``, that lacks the loss scale."""
    return (
        f"{what} comes from a loss that was not multiplied by the loss scale {scaler.value:g}, and would be divided by "
        "it; for every loss of a step call booster.backward(loss, optimizer) in place of loss.backward(), or without a "
        "Booster optimizer.scale_loss(loss).backward()"
    )


class ScaleWatch:
    """Detector of the first parameter of a wrapped model whose gradient lacks the loss scale, within one step.

    The hook of every parameter calls ``look``, which costs two comparisons unless it finds such a gradient. Pipeline
    stages start backwards from other stages' gradients, so there the pipeline's runner reports losses that it has not
    scaled.
    """

    def __init__(self, scaler: Callable[[], LossScaler | None], *, in_pipeline: bool) -> None:
        self.scaler = scaler
        self.in_pipeline = in_pipeline
        self.unscaled: str | None = None

    def look(self, bucket: Bucket, index: int) -> None:
        """Check a gradient that has just arrived."""
        if not self.in_pipeline and lacks_scale(self.scaler()) and self.unscaled is None:
            self.unscaled = f"the gradient of {bucket.contracts[index].name!r}"

    def record_loss(self) -> None:
        """Check a loss whose backward a pipeline's runner starts unscaled. The user's function may have scaled it."""
        scaler = self.scaler()
        if scaler is not None and scaler.value != 1.0 and not (scaler.has_scaled or scaler.is_by_hand):
            self.unscaled = "the loss of a microbatch"

    def reset(self) -> None:
        self.unscaled = None

    @property
    def problem(self) -> str | None:
        """Return the error text for a gradient that lacks the scale, or ``None``."""
        scaler = self.scaler()
        if self.unscaled is None or scaler is None:
            return None
        if self.in_pipeline:
            return (
                f"{self.unscaled} was not multiplied by the loss scale {scaler.value:g}, and its gradients would be "
                "divided by it; set config.grad_scale_func = optimizer.scale_loss"
            )
        return unscaled(self.unscaled, scaler)

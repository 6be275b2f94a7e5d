"""Gradients that come from a loss without the loss scale, found before a step divides them by it.

The scale is the same for all gradients of a step, and is divided out once, at its end. So every backward must begin at
a loss that was multiplied by it. A hook on each scaled loss notes its backward, and a gradient that arrives while none
of them runs is refused by its name.

Two kinds of programs may be right without it, and are not judged: those that ask for the scale before their first step,
to multiply by hand; and those whose scaled loss reaches no parameter, because they pass its gradients on (embeddings
that are computed in parts).
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
    """A running backward of a scaled loss."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self.scale = scaler.value
        self.has_arrived = False  # True once it has reached a parameter that is watched


_RUNNING: list[_Backward] = []  # of this process, as one loss may train the models of several optimizers


def scale_loss(loss: torch.Tensor, scaler: LossScaler) -> torch.Tensor:
    """Multiply a loss by the loss scale, and note its backward."""
    scaled = loss * scaler.value
    if scaled.requires_grad:
        scaler.has_scaled = True
        if _RUNNING and not backward_runs():
            _RUNNING.clear()  # backwards that have failed
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
    """Surround a backward from gradients that carry the loss scale already, such as another rank's."""
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
    """Return True if a gradient that arrives now comes from a backward that did not begin at a scaled loss."""
    if scaler is None or scaler.value == 1.0:
        return False
    for running in _RUNNING:
        if running.scale == scaler.value:
            running.has_arrived = True
            return False
    return not scaler.is_by_hand and backward_runs()


def unscaled(what: str, scaler: LossScaler) -> str:
    """Return the error text for a gradient, named by `what`, that lacks the loss scale."""
    return (
        f"{what} comes from a loss that was not multiplied by the loss scale {scaler.value:g}, and would be divided by "
        "it; for every loss of a step call booster.backward(loss, optimizer) in place of loss.backward(), or without a "
        "Booster optimizer.scale_loss(loss).backward()"
    )


class ScaleWatch:
    """Notes the first parameter of a wrapped model whose gradient lacks the loss scale, in one step.

    The hook of every parameter calls `look`, which compares two numbers while it finds nothing. Stages of a pipeline
    begin backwards with gradients of other stages. There the runner reports the losses that it has not scaled.
    """

    def __init__(self, scaler: Callable[[], LossScaler | None], *, in_pipeline: bool) -> None:
        self.scaler = scaler
        self.in_pipeline = in_pipeline
        self.unscaled: str | None = None

    def look(self, bucket: Bucket, index: int) -> None:
        """A gradient has arrived."""
        if not self.in_pipeline and lacks_scale(self.scaler()) and self.unscaled is None:
            self.unscaled = f"the gradient of {bucket.contracts[index].name!r}"

    def note_loss(self) -> None:
        """A pipeline's runner begins the backward of a loss that it has not scaled; its function may have done so."""
        scaler = self.scaler()
        if scaler is not None and scaler.value != 1.0 and not (scaler.has_scaled or scaler.is_by_hand):
            self.unscaled = "the loss of a microbatch"

    def reset(self) -> None:
        """A new step begins."""
        self.unscaled = None

    @property
    def problem(self) -> str | None:
        """Error text for a gradient that lacks the scale; None if there is none."""
        scaler = self.scaler()
        if self.unscaled is None or scaler is None:
            return None
        if self.in_pipeline:
            return (
                f"{self.unscaled} was not multiplied by the loss scale {scaler.value:g}, and its gradients would be "
                "divided by it; set config.grad_scale_func = optimizer.scale_loss"
            )
        return unscaled(self.unscaled, scaler)

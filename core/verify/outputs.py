"""Detect targets that broadcast, from a model's outputs and their gradients in two steps.

Targets of shape [n] broadcast against outputs of shape [n, 1]. The gradient of an output then does not depend on its
own target. The same happens if all outputs have the same target, as in a value net that learns one episode's return.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.distributed.buffer.grad_attribute import weakly
from core.distributed.buffer.grad_placeholder import tensors_in
from core.distributed.guard.replicas import is_readable

LEAST_COLUMN = 4  # number of outputs; fewer can be collinear by chance
ON_A_LINE = 1e-4  # relative distance of gradients from the line
OTHER_TARGET = 1e-3  # relative change of the target between two steps

Target = tuple[float, float]  # apparent common target of a forward's outputs, and their magnitude


class Outputs:
    """Columns of one module's outputs, and their gradients."""

    def __init__(self) -> None:
        self.forwards = 0
        self.columns: dict[int, tuple[Tensor, Tensor]] = {}  # forward -> outputs [n], their gradients [n]
        self.targets: list[dict[int, Target]] = []  # for each step, by forward

    def note(self, _: nn.Module, __: Any, output: Any) -> None:
        """Record the outputs of a forward. A forward hook."""
        number, self.forwards = self.forwards, self.forwards + 1
        for tensor in tensors_in(output):
            is_column = LEAST_COLUMN <= tensor.numel() == tensor.shape[0] if tensor.dim() else False
            if is_column and tensor.requires_grad and tensor.dtype.itemsize > 2 and is_readable(tensor):
                tensor.register_hook(partial(weakly(self._take), number, tensor.detach().reshape(-1).clone()))

    def _take(self, number: int, values: Tensor, grad: Tensor) -> None:
        self.columns[number] = values, grad.detach().reshape(-1).clone()

    def end_step(self) -> None:
        """Find the targets of the compared step."""
        found = {number: _target(*column) for number, column in self.columns.items()}
        self.targets.append({} if None in found.values() else {n: at for n, at in found.items() if at is not None})
        self.columns, self.forwards = {}, 0

    def broadcast(self) -> str:
        """Report if all outputs of each forward have one target, and another one in the other step; '' otherwise."""
        if len(self.targets) < 2 or not self.targets[0]:
            return ""
        for number, (target, size) in self.targets[0].items():
            other = self.targets[1].get(number)
            if other is None or abs(target - other[0]) <= OTHER_TARGET * (size + other[1]):
                return ""
        return (
            "the gradient of each output depends on that output alone and not on its own target: does a loss subtract "
            "targets of shape [n] from outputs of shape [n, 1]? They broadcast to [n, n]; give both one shape"
        )


@torch.no_grad()
def _target(outputs: Tensor, gradients: Tensor) -> Target | None:
    """Return the target of a squared error if all outputs share one, else None.

    The gradients then rise along a line that is 0 at the target.
    """
    outputs, gradients = outputs.double(), gradients.double()
    middle, level = outputs.mean(), gradients.mean()
    x, y = outputs - middle, gradients - level
    slope = (x * y).sum() / (x * x).sum().clamp(min=1e-300)
    found = torch.stack([middle, level, slope, x.std(), gradients.norm(), y.norm(), (y - slope * x).norm()])
    at, height, rise, width, size, spread, off = found.tolist()
    if spread > ON_A_LINE * size and off <= ON_A_LINE * spread and rise > 0:
        target = at - height / rise
        return target, abs(target) + abs(at) + width
    return None

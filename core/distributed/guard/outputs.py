"""Outputs: what a wrapped model gives in its first two steps, and what backward makes of it.

Two mistakes that all ranks share show here. A batch of targets broadcasts against a column of outputs: then the
gradient of an output does not depend on its own target. And a block that is recomputed in backward is given another
input than in forward, because that has been written to or random numbers before it are other ones. The first step shows
which modules run in backward. Only their inputs are looked at in the second one, as two sums each.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from core.distributed.buffer.grad_attribute import weakly
from core.distributed.guard.inputs import MOST_FORWARDS

LEAST_COLUMN = 4  # outputs; fewer lie on a line by chance
ON_A_LINE = 1e-4  # how far gradients may be off it, relative
BLOCK = 2**16  # elements that a CPU casts at a time
OTHER_TARGET = 1e-3  # by how much it must differ between two steps, relative

Target = tuple[float, float]  # the one that all outputs of a forward seem to have, and the size of these numbers

_WATCHED: weakref.WeakValueDictionary[int, Outputs] = weakref.WeakValueDictionary()  # by the identity of a module


class Outputs:
    """Outputs of one module in two steps, and inputs of its parts; recording never waits for the device."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.hooks: list[Any] = []
        self.is_forward = False  # True while the module runs
        self.is_backward = False  # True from the first gradient of an output until the next forward
        self.on_all_modules: Any = None  # the hook that notes modules which run in backward
        self.again: set[int] = set()  # identities of these modules
        self.forwards = 0
        self.columns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by forward: outputs [n], their gradients [n]
        self.targets: dict[int, Target] = {}  # by forward, of the step before
        self.sums: dict[int, list[torch.Tensor]] = {}  # by module, of its inputs in forward: [2] each
        self.sums_again: list[tuple[int, torch.Tensor, float]] = []  # (module, of an input in backward, tolerance)

    def start(self) -> None:
        _WATCHED[id(self.module)] = self
        self.hooks.append(self.module.register_forward_hook(_end_forward))

    def begin_forward(self) -> None:
        self.is_forward = True
        self._end_backward()

    def end_forward(self, output: Any) -> None:
        if not self.is_forward:
            return
        self.is_forward = False
        number, self.forwards = self.forwards, self.forwards + 1
        for tensor in tensors_of(output) if number < MOST_FORWARDS else ():
            # A subclass may be logits that are computed in chunks, and all of them if they are looked at.
            if type(tensor) is torch.Tensor and tensor.requires_grad:
                tensor.register_hook(weakly(self.begin_backward))
                is_column = LEAST_COLUMN <= tensor.numel() == tensor.shape[0] if tensor.dim() else False
                if is_column and tensor.dtype.itemsize > 2:
                    values = tensor.detach().reshape(-1).clone()
                    tensor.register_hook(partial(weakly(self._take_column), number, values))

    def _take_column(self, number: int, values: torch.Tensor, grad: torch.Tensor) -> None:
        self.columns[number] = values, grad.detach().reshape(-1).clone()

    def begin_backward(self, _: torch.Tensor) -> None:
        """An output has got its gradient: modules that run until the next forward are recomputed."""
        self.is_backward = True
        if self.on_all_modules is None and not self.again:
            self.on_all_modules = register_module_forward_pre_hook(weakly(self._note_again))
            weakref.finalize(self, self.on_all_modules.remove)  # a model may be dropped after a backward

    def _note_again(self, module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled():
            self.again.add(id(module))

    def _end_backward(self) -> None:
        self.is_backward = False
        if self.on_all_modules is not None:
            self.on_all_modules.remove()
            self.on_all_modules = None

    def take(self, module: nn.Module, given: Any) -> None:
        """A module that is recomputed begins."""
        tensor = next(iter(tensors_of(given)), None)
        if tensor is None or not (self.is_forward or (self.is_backward and torch.is_grad_enabled())):
            return
        sums = sums_of(tensor.detach())
        if self.is_forward:
            self.sums.setdefault(id(module), []).append(sums)
        else:
            self.sums_again.append((id(module), sums, 1e-5 if tensor.dtype.itemsize > 2 else 1e-3))

    def end_step(self, *, counts: bool, is_second: bool) -> list[str]:
        """Return what is wrong, in words, after the second step that counts."""
        self._end_backward()
        targets = {number: _target(*column) for number, column in self.columns.items()} if counts else {}
        texts = [*self._broadcast(targets), *self._recomputed()] if counts and is_second else []
        if counts and not is_second:
            self.targets = {} if None in targets.values() else {n: at for n, at in targets.items() if at is not None}
            for module in self.module.modules():
                if id(module) in self.again:
                    _WATCHED[id(module)] = self
                    self.hooks.append(module.register_forward_pre_hook(_take, with_kwargs=True))
        self.columns, self.sums, self.sums_again, self.forwards = {}, {}, [], 0
        return texts

    def stop(self) -> None:
        self._end_backward()
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.columns, self.sums, self.sums_again = [], {}, {}, []

    def _broadcast(self, now: dict[int, Target | None]) -> list[str]:
        """One target for all outputs of each forward, and another one in the other step. A constant is no mistake."""
        pairs = [(before, now.get(number)) for number, before in self.targets.items()]
        if not pairs or any(b is None or abs(a[0] - b[0]) <= OTHER_TARGET * (a[1] + b[1]) for a, b in pairs):
            return []
        return [
            "the gradient of each output depends on that output alone and not on its own target: does a loss subtract "
            "targets of shape [n] from outputs of shape [n, 1]? They broadcast to [n, n]; give both one shape"
        ]

    def _recomputed(self) -> list[str]:
        """The first module that was given something in backward that it was never given in forward."""
        if not self.sums_again or self.forwards > MOST_FORWARDS:
            return []
        device = self.sums_again[0][1].device
        again = torch.stack([sums.to(device) for _, sums, _ in self.sums_again]).tolist()
        known = {module: torch.stack(found).tolist() for module, found in self.sums.items()}
        for (module, _, tolerance), (total, size) in zip(self.sums_again, again, strict=True):
            there = known.get(module, [])
            if not any(abs(total - a) + abs(size - b) <= tolerance * b for a, b in there):
                name = next((name for name, part in self.module.named_modules() if id(part) == module), "")
                return [
                    f"{name!r} is recomputed in backward from another input than in forward, so its gradients are "
                    "wrong. Has that tensor been written to in between, or does a module before it draw other random "
                    "numbers (preserve_rng_state=False)?"
                ]
        return []


@torch.no_grad()
def _target(outputs: torch.Tensor, gradients: torch.Tensor) -> Target | None:
    """The target of a squared error if all outputs have the same: their gradients rise along a line, which is 0 there.

    None if the points lie on no line, or if it does not rise.
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


def sums_of(values: torch.Tensor) -> torch.Tensor:
    """[2] in fp32: the sum, and that of magnitudes. Takes no memory worth counting: a copy of a layer's input could be
    the highest point of a step.

    A GPU reads any dtype as it sums. A CPU casts what has 16 bits first, so there it comes in blocks.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    rows = values.flatten(0, -2) if values.dim() > 2 else values
    is_read_whole = values.device.type != "cpu" or values.numel() <= BLOCK
    blocks = [rows] if is_read_whole else rows.split(max(1, BLOCK * len(rows) // rows.numel()))
    each = [
        torch.stack([block.sum(dtype=wide), torch.linalg.vector_norm(block, 1, dtype=wide)]).float() for block in blocks
    ]
    return torch.stack(each).sum(dim=0)


def tensors_of(output: Any) -> Sequence[torch.Tensor]:
    """The tensors of numbers with a fraction in an output or in inputs, not those deeper inside."""
    parts = output if isinstance(output, (tuple, list)) else output.values() if isinstance(output, dict) else (output,)
    return [part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point()]


# Hooks are functions, so that a module is copied and pickled without what looks at it.


def _end_forward(module: nn.Module, _: Any, output: Any) -> None:
    watch = _WATCHED.get(id(module))
    if watch is not None and watch.module is module:
        watch.end_forward(output)


def _take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    watch = _WATCHED.get(id(module))
    if watch is not None:
        watch.take(module, (*args, *kwargs.values()))

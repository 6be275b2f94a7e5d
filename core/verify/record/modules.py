"""Sketch the outputs of a chunk's modules, and the gradients at them, while a step runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.checkpoint.global_slices import GlobalSlice
from core.distributed.buffer.grad_placeholder import tensors_in
from core.groups.global_names import namer
from core.verify.cuts import rows_of
from core.verify.record.sketches import Sketch, of_integers, of_rows
from core.verify.recording import unsharded

Key = tuple[str, str]  # table of the recording, name


class ModuleSketches:
    """Hooks on the modules of one chunk, which sketch the calls of a step.

    A tensor is sketched in the hook and not stored. Forwards without gradients are left out, such as an evaluation.

    Args:
        chunk: The chunk, without its wrapper.
        weights: Split weights by the name of their module.
    """

    def __init__(self, chunk: nn.Module, weights: Mapping[str, GlobalSlice]) -> None:
        self.sketches: dict[Key, list[Sketch]] = {}  # one for each call
        self.eps = 0.0  # largest rounding unit
        self.depth = 0  # number of running forwards of the chunk; a module that runs outside them is recomputed
        self.active = False  # True in a forward with gradients
        self.latest: tuple[Tensor, list[str], Sketch | None] | None = None  # last output, and all its names
        self.latest_grad: tuple[Tensor, Sketch] | None = None
        self.columns: dict[str, tuple[GlobalSlice, tuple[Tensor, Tensor]]] = {}
        # Runs before fully_shard's hook, which casts the inputs.
        self.handles: list[Any] = [chunk.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)]
        name_of = namer(chunk)
        for local_name, module in chunk.named_modules():
            name = name_of(local_name)
            place = weights.get(name)
            if place is not None and "Embedding" not in type(module).__name__:  # rows of an embedding are words
                self.columns[name] = place, rows_of(place)
            self.handles.append(module.register_forward_hook(partial(self._forward, name)))
        self.handles.append(chunk.register_forward_hook(lambda *_: self._move(-1), always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def _move(self, by: int) -> None:
        self.depth += by
        self.latest = self.latest_grad = None

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.depth == 0:
            self.active = torch.is_grad_enabled()
        self._move(1)
        for name, value in (*enumerate(args), *kwargs.items()) if torch.is_grad_enabled() else ():
            for tensor in map(unsharded, tensors_in(value)):
                if not tensor.is_floating_point() and tensor.dtype != torch.bool:
                    self._add("data", str(name), of_integers(tensor))
                elif tensor.is_floating_point() and not tensor.requires_grad:
                    self._add("data", str(name), of_rows(tensor))

    def _forward(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        if self.active or self.depth == 0:
            tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.numel()]
            for part, tensor in enumerate(tensors):
                self._output(name, f"{name}[{part}]" if part else name, tensor)

    def _output(self, module: str, name: str, tensor: Tensor) -> None:
        """Sketch an output. A container often returns its last child's tensor, which is sketched once."""
        known, names, sketch = self.latest or (None, [], None)
        if known is not tensor:
            names, sketch = [], self._sketch(module, tensor) if self.depth else None
            if tensor.requires_grad:  # in a recomputation too: a checkpoint's tensors may get their gradients only then
                tensor.register_hook(partial(self._gradient, module, names))
        if sketch is not None:
            self._add("outputs", name, sketch)
            self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        names.append(name)
        self.latest = tensor, names, sketch

    def _gradient(self, module: str, names: list[str], grad: Tensor) -> None:
        """Sketch the first gradient that arrives at a tensor, for all its names."""
        if not names:
            return
        known, sketch = self.latest_grad or (None, None)
        if known is not grad or sketch is None or module in self.columns:
            sketch = self._sketch(module, grad)
        self.latest_grad = grad, sketch  # both terms of a residual sum get one tensor
        for name in names:
            self._add("gradients", name, sketch)
        names.clear()
        self.latest = None

    def _sketch(self, module: str, tensor: Tensor) -> Sketch:
        full = unsharded(tensor.detach())
        place, columns = self.columns.get(module, (None, None))
        if place is None or not full.dim() or not place.local_shape[0] == full.shape[-1] != place.shape[0]:
            return of_rows(full)
        return of_rows(full, width=place.shape[0], columns=columns)

    def _add(self, table: str, name: str, sketch: Sketch) -> None:
        self.sketches.setdefault((table, name), []).append(sketch)

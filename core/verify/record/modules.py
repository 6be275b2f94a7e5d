"""Sketch the outputs of a chunk's modules, and the gradients at them, while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core.checkpoint.global_slices import GlobalSlice
from core.distributed.buffer.grad_placeholder import tensors_in
from core.groups.global_names import namer
from core.verify.record.merge import Key
from core.verify.record.sketches import Sketch, of_integers, of_rows
from core.verify.recording import Recorder, unsharded


class ModuleSketches(Recorder):
    """Hooks on the modules of one chunk, which add up sketches over the calls of a step.

    A tensor is sketched in the hook and not stored. Forwards without gradients are left out, such as an evaluation.

    Args:
        chunk: The chunk, without its wrapper.
        weights: Split weights by the name of their module.
    """

    def __init__(self, chunk: nn.Module, weights: Mapping[str, GlobalSlice]) -> None:
        super().__init__()
        self.sketches: dict[Key, Sketch] = {}
        self.eps = 0.0  # largest rounding unit
        self.active = False  # True in a forward with gradients
        self.latest: tuple[Tensor, list[str], Sketch | None] | None = None  # last output, and all its names
        self.latest_grad: tuple[Tensor, Sketch] | None = None
        self.columns: dict[str, tuple[GlobalSlice, tuple[Tensor, Tensor]]] = {}
        name_of = namer(chunk)
        for local_name, module in chunk.named_modules():
            place = weights.get(name_of(local_name))
            if place is not None and "Embedding" not in type(module).__name__:  # rows of an embedding are words
                rows = [(box.global_offset[0], box.local_offset[0], box.size[0]) for box in place.boxes]
                there = [start + row for start, _, size in rows for row in range(size)]
                here = [start + row for _, start, size in rows for row in range(size)]
                self.columns[name_of(local_name)] = place, (torch.tensor(there), torch.tensor(here))
        # Runs before fully_shard's hook, which casts the inputs.
        self.handles.append(chunk.register_forward_pre_hook(self._data_hook(), with_kwargs=True, prepend=True))
        self.add(chunk, name_of)

    def _deeper(self, by: int) -> None:
        if self.depth == 0:
            self.active = torch.is_grad_enabled()
        super()._deeper(by)
        self.latest = self.latest_grad = None

    def _data_hook(self) -> Callable[..., None]:
        def take(_: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                for name, value in (*enumerate(args), *kwargs.items()):
                    self._take_data(str(name), value)

        return take

    def _take_data(self, name: str, value: Any) -> None:
        for tensor in tensors_in(value):
            if tensor.is_floating_point() and not tensor.requires_grad:
                self._sum("data", name, of_rows(unsharded(tensor)))
            elif not tensor.is_floating_point() and tensor.dtype != torch.bool:
                self._sum("data", name, of_integers(unsharded(tensor)))

    def _input_hook(self, name: str) -> Callable[..., None]:
        return lambda *_: None

    def _hook(self, name: str) -> Callable[..., None]:
        def take(_: nn.Module, __: Any, output: Any) -> None:
            if self.active or self.is_again:
                tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.numel()]
                for part, tensor in enumerate(tensors):
                    self._take(name, f"{name}[{part}]" if part else name, tensor)

        return take

    def _take(self, module: str, name: str, tensor: Tensor) -> None:
        """Sketch an output. A container often returns its last child's tensor, which is sketched once."""
        known, names, sketch = self.latest or (None, [], None)
        if known is not tensor:
            names, sketch = [], None if self.is_again else self._sketch(module, tensor)
            self._follow(module, names, tensor)
        if sketch is not None:
            self._sum("outputs", name, sketch)
            self.eps = max(self.eps, torch.finfo(tensor.dtype).eps)
        names.append(name)
        self.latest = tensor, names, sketch

    def _follow(self, module: str, names: list[str], tensor: Tensor) -> None:
        """Sketch the first gradient that arrives at a tensor, for all its names.

        A checkpoint's tensors may get theirs only as they are recomputed, so this is called in backward too.
        """

        def take(grad: Tensor) -> None:
            if names:
                known, sketch = self.latest_grad or (None, None)
                if known is not grad or sketch is None or module in self.columns:
                    sketch = self._sketch(module, grad)
                self.latest_grad = grad, sketch  # both terms of a residual sum get one tensor
                for name in names:
                    self._sum("gradients", name, sketch)
                names.clear()
                self.latest = None

        if tensor.requires_grad:
            tensor.register_hook(take)

    def _sketch(self, module: str, tensor: Tensor) -> Sketch:
        full = unsharded(tensor.detach())
        place, columns = self.columns.get(module, (None, None))
        if place is None or not full.dim() or not place.local_shape[0] == full.shape[-1] != place.shape[0]:
            return of_rows(full)
        return of_rows(full, width=place.shape[0], columns=columns)

    def _sum(self, table: str, name: str, sketch: Sketch) -> None:
        known = self.sketches.get((table, name))
        if known is not None:
            width = sketch.width if sketch.width == known.width else -2
            numbers, digest = known.numbers + sketch.numbers, known.digest + sketch.digest
            sketch = Sketch(numbers, digest, known.numel + sketch.numel, width)
        self.sketches[table, name] = sketch

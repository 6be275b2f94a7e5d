"""Record every module's output in a step, and the gradient that arrives there in backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from core.distributed.buffer.grad_placeholder import tensors_in
from core.groups.param_attributes import data_group_of


class Point(NamedTuple):
    """One output tensor of one module call.

    Attributes:
        module: Name of the module in the full model.
        call: Index of the call.
        part: Index of the tensor in the output.
    """

    module: str
    call: int
    part: int


class Recorder:
    """Recorder of module outputs and gradients. A context manager: leaving it removes the hooks.

    Calls are counted over a step: a layer that is called twice in each of two microbatches has calls 0 to 3.

    Attributes:
        outputs: Outputs by point, on the CPU, in the order of forward.
        gradients: Gradients by point, on the CPU.
        stale: Modules that a checkpoint recomputed from another input or to another output than in forward, and the
            relative difference.
        calls: Number of calls by module.
    """

    def __init__(self) -> None:
        self.outputs: dict[Point, Tensor] = {}
        self.gradients: dict[Point, Tensor] = {}
        self.stale: dict[str, float] = {}
        self.stale_inputs: dict[str, float] = {}  # used only if no output differs: outer modules may see the same input
        self.calls: dict[str, int] = {}
        self.inputs: dict[str, list[tuple[float, float]]] = {}  # module -> sum and absolute sum of each call's input
        self.again: set[tuple[str, int]] = set()  # recomputed calls
        self.depth = 0  # number of running chunk forwards
        self.in_backward: bool | None = None  # None (pipelines): any time outside a chunk's forward is backward
        self.handles: list[Any] = []

    def add(self, model: nn.Module, name_of: Callable[[str], str], leave_out: Collection[str] = ()) -> None:
        """Register hooks on the modules of a model or chunk."""
        self.handles.append(model.register_forward_pre_hook(lambda *_: self._deeper(1)))
        for local_name, module in model.named_modules():
            name = name_of(local_name)
            if name not in leave_out:
                self.handles.append(module.register_forward_pre_hook(self._input_hook(name)))
                self.handles.append(module.register_forward_hook(self._hook(name)))
        self.handles.append(model.register_forward_hook(lambda *_: self._deeper(-1), always_call=True))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.stale = self.stale or self.stale_inputs
        for handle in self.handles:
            handle.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Treat modules that run inside the context as recomputation by a checkpoint."""
        self.in_backward = True
        yield
        self.in_backward = False

    def _deeper(self, by: int) -> None:
        self.depth += by

    @property
    def is_again(self) -> bool:
        """True if a module that runs now is being recomputed."""
        return self.depth == 0 if self.in_backward is None else self.in_backward

    def _input_hook(self, name: str) -> Callable[..., None]:
        """Return a hook that compares inputs. A checkpoint may stop inside a module, so its output never appears."""

        def look(_: nn.Module, given: Any) -> None:
            tensor = next((each for each in tensors_in(list(given)) if each.is_floating_point()), None)
            if tensor is None:
                return
            wide = unsharded(tensor.detach()).double()
            total, size = float(wide.sum()), float(wide.abs().sum())
            known = self.inputs.setdefault(name, [])
            if not self.is_again:
                known.append((total, size))
                return
            off = [(abs(total - a) + abs(size - b)) / max(b, 1e-300) for a, b in known]
            if off and min(off) > 1e3 * torch.finfo(tensor.dtype).eps:
                self.stale_inputs.setdefault(name, min(off))

        return look

    def _hook(self, name: str) -> Callable[..., None]:
        def take(_: nn.Module, __: Any, output: Any) -> None:
            tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
            if self.is_again:
                self._take_again(name, tensors)
                return
            call = self.calls.get(name, 0)
            self.calls[name] = call + 1
            for part, tensor in enumerate(tensors):
                point = Point(name, call, part)
                self.outputs[point] = unsharded(tensor.detach()).cpu().clone()
                self._listen(point, tensor)

        return take

    def _listen(self, point: Point, tensor: Tensor) -> None:
        def record(grad: Tensor | None) -> None:
            if grad is not None:  # an output that the loss does not use may get no gradient
                self.gradients.setdefault(point, unsharded(grad.detach()).cpu().clone())

        if tensor.requires_grad:
            tensor.register_hook(record)

    def _take_again(self, name: str, tensors: list[Tensor]) -> None:
        """Find the recomputed call, by equal outputs. A reentrant checkpoint builds its graph only now."""
        differences = {}
        for call in range(self.calls.get(name, 0)):
            if (name, call) in self.again:
                continue
            points = [Point(name, call, part) for part in range(len(tensors))]
            known = [self.outputs.get(point) for point in points]
            differences[call] = max(
                (relative_difference(unsharded(new), old) for new, old in zip(tensors, known, strict=True)), default=0.0
            )
            if all(
                differences[call] <= 64 * torch.finfo(tensor.dtype).eps for tensor in tensors
            ):  # a GPU's atomics may change the order of summation
                self.again.add((name, call))
                for point, tensor in zip(points, tensors, strict=True):
                    self._listen(point, tensor)
                return
        if differences:
            self.stale.setdefault(name, min(differences.values()))


def unsharded(tensor: Tensor) -> Tensor:
    """Gather a DTensor, which is collective over its mesh; return any other tensor unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def relative_difference(have: Tensor, want: Tensor | None) -> float:
    """Return the norm of the difference relative to the norm of ``want``; infinite if the shapes differ."""
    if want is None or have.shape != want.shape:
        return float("inf")
    wide = want.double()
    return float((have.detach().cpu().double() - wide).norm()) / max(float(wide.norm()), 1e-300)


def dense_parameters(model: nn.Module, name_of: Callable[[str], str]) -> dict[str, frozenset[str]]:
    """Return the names of the non-expert parameters below each module.

    They show which containers a pipeline stage holds completely.
    """
    below: dict[str, set[str]] = {name_of(name): set() for name, _ in model.named_modules()}
    for local_name, param in model.named_parameters():
        if data_group_of(param) == "expt_dp":
            continue
        owner, name = local_name, name_of(local_name)
        while owner:
            owner = owner.rpartition(".")[0]
            below[name_of(owner)].add(name)
    return {name: frozenset(names) for name, names in below.items()}

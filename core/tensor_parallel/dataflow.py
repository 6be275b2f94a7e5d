"""Dataflow analysis of one forward under tensor parallelism, which finds parameters with partial gradients.

Tensors computed from split parameters differ between tensor-parallel ranks until a seam sums or gathers them. If a
replicated parameter (a query norm, a learned activation) is combined with such a tensor, its gradient is a partial sum.
If a replicated activation is combined with such a tensor outside a seam, everything before it receives a partial
gradient, and the model is wrong.

This is not a tracer: the model runs unchanged, and each torch function is inspected as it runs. A seam is a forward
that calls the collectives in ``core.tensor_parallel.mappings``. During the analysis its ``watch`` attribute is the
Dataflow, to which it reports its operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree

COPIED = frozenset([""])  # no parameter has this name
ATTENTION = "scaled_dot_product_attention"  # applies dropout to its attention weights


class Dataflow(TorchFunctionMode):
    """Mode that records which replicated parameters are combined with split activations in a forward.

    A tensor is in one of three states: split (tracked by storage, so that views and in-place writes are covered),
    copied (a seam sums its gradient), or replicated. ``_roots`` maps a tensor to the parameters it was computed from
    (as in ``1 + weight``), if no other trainable tensor was involved. Anything combined with the tensor is then
    combined with these parameters. COPIED among them marks a seam's copy.

    Attributes:
        partial: Parameters that are combined with split tensors.
        complete: Parameters used in computations that are the same on all ranks. A parameter may be in both sets.
        drops: Modules that apply dropout, without their children: True for split tensors, False for replicated ones.
        faults: Errors that no contract can correct, one sentence each, such as a replicated activation combined with a
            split tensor.
    """

    def __init__(self, model: nn.Module, split: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.partial: set[str] = set()
        self.complete: set[str] = set()
        self.drops: dict[bool, set[str]] = {True: set(), False: set()}  # key: True if the tensor is split
        self.faults: list[str] = []
        self._split = {id(parameter) for parameter in split}
        self._split_storages: dict[int, Tensor] = {}
        self._tails: dict[int, tuple[Tensor, int]] = {}  # tensors with only their last features in state copied
        self._roots: dict[int, tuple[Tensor, frozenset[str]]] = {}
        self._where: list[str] = []
        self._is_paused = False
        self._handles = [
            handle
            for name, module in model.named_modules()
            for handle in (
                module.register_forward_pre_hook(lambda *_, name=name: self._where.append(name)),
                module.register_forward_hook(lambda *_, name=name: self._where.remove(name), always_call=True),
            )
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the analysis inside the block. A seam reports its own result."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    # -- reports of seams -----------------------------------------------------------------------------------------

    def enter(self, whole: Tensor, copied: Tensor) -> Tensor:
        """Record a seam's copy of a replicated input and return it. It is a new tensor, whose gradient the seam
        sums.
        """
        if copied is whole:
            copied = whole.view_as(whole)
        if self._roots_of(whole) >= COPIED:
            self._fault("sums the gradient of its input over tp, and a seam around it does so already")
        self._must_be_whole(whole)
        self._roots[id(copied)] = copied, COPIED
        return copied

    def cut(self, whole: Tensor, part: Tensor) -> None:
        """Record that a seam has taken this rank's part of a replicated input, and gathers its gradient."""
        self._must_be_whole(whole)
        self._mark_split(part)

    def leave(self, before: Tensor, after: Tensor) -> None:
        """Record that a seam has summed or gathered ``before``, so that ``after`` is replicated."""
        if not self._is_split(before):
            self._fault("sums or gathers its output over tp, which is whole already")
        place = _storage_of(after)
        if place is not None:
            self._split_storages.pop(place, None)
        self._roots.pop(id(after), None)

    def leave_split(self, output: Tensor) -> None:
        """Record a seam's split output. The seam sums the gradient of its input."""
        if not self._is_split(output):
            self._fault("sums the gradient of its input over tp, and its output is whole")

    def select(self, whole: Tensor, part: Tensor) -> None:
        """Record that a seam has taken this rank's heads from a replicated output."""
        if whole.requires_grad:
            self._mark_partial([whole], "a selection of heads")
        self._roots.pop(id(part), None)
        self._mark_split(part)

    def copy_tail(self, before: Tensor, after: Tensor, features: int) -> None:
        """Record that a seam sums the gradient of an output's last ``features`` features."""
        self._must_be_whole(before)
        self._roots.pop(id(after), None)
        self._tails[id(after)] = after, features

    def _must_be_whole(self, tensor: Tensor) -> None:
        if self._is_split(tensor):
            self._fault("takes a whole input, and was given what each rank has another part of")
        self.complete |= self._roots_of(tensor) - COPIED

    def _fault(self, what: str) -> None:
        sentence = f"module {self._where[-1] if self._where else ''!r} {what}"
        if sentence not in self.faults:
            self.faults.append(sentence)

    # -- torch functions -------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        learned = [tensor for tensor in inputs if tensor.requires_grad and tensor.numel()]
        output = func(*args, **kwargs)
        outputs = [leaf for leaf in tree.tree_leaves(output) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", str(func))
        if name == "__setitem__":
            outputs = inputs[:1]
        if not inputs or not outputs:
            return output
        is_split = any(self._is_split(tensor) for tensor in inputs)
        if "dropout" in name or name == ATTENTION:
            self.drops[is_split].add(self._where[-1] if self._where else "")
        if is_split:
            for tensor in outputs:
                self._mark_split(tensor)
            if any(tensor.requires_grad for tensor in outputs):
                self._mark_partial(learned, name)
            return output
        self._pass(inputs, learned, outputs)
        return output

    def _mark_partial(self, learned: list[Tensor], function: str) -> None:
        """Record that the gradients of these tensors come from this rank's part of a computation."""
        for tensor in learned:
            if self._is_split(tensor):
                continue
            roots = self._roots_of(tensor)
            self.partial |= roots - COPIED
            if not roots:
                self._fault(
                    f"computes {function} of a whole activation and of what is split over tp: the activation's "
                    "gradient is partial, and no seam of the plan sums it"
                )

    def _pass(self, inputs: list[Tensor], learned: list[Tensor], outputs: list[Tensor]) -> None:
        """Propagate the roots through a function without split inputs."""
        tail = next((self._tails[id(tensor)] for tensor in inputs if id(tensor) in self._tails), None)
        if tail is not None:
            for tensor in outputs:
                if _is_tail(tensor, *tail):
                    self._roots[id(tensor)] = tensor, COPIED
            return
        each = [self._roots_of(tensor) for tensor in learned]
        roots = frozenset[str]().union(*each)
        if not all(each):  # every gradient here is the same on all ranks
            self.complete |= roots - COPIED
            if roots >= COPIED:
                self._fault("mixes a whole activation with one whose gradient a seam sums")
            roots = frozenset()
        for tensor in outputs:
            self._roots.pop(id(tensor), None)
            if roots:
                self._roots[id(tensor)] = tensor, roots

    def _mark_split(self, tensor: Tensor) -> None:
        place = _storage_of(tensor)
        if place is not None:
            self._split_storages[place] = tensor

    def _is_split(self, tensor: Tensor) -> bool:
        return id(tensor) in self._split or _storage_of(tensor) in self._split_storages

    def _roots_of(self, tensor: Tensor) -> frozenset[str]:
        """Return the parameters (and COPIED) that a replicated tensor was computed from.

        The result is empty if another trainable tensor was involved.
        """
        if id(tensor) in self.names:
            return frozenset([self.names[id(tensor)]])
        return self._roots[id(tensor)][1] if id(tensor) in self._roots else frozenset()


def _is_tail(part: Tensor, whole: Tensor, features: int) -> bool:
    """Return ``True`` if ``part`` starts in the last features of ``whole``, or is not a view of it."""
    if _storage_of(part) != _storage_of(whole):
        return True
    width = whole.shape[-1]
    return (part.storage_offset() - whole.storage_offset()) % width >= width - features


def _storage_of(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory, or ``None`` if it is empty or a placeholder inside torch.vmap
    (masks).
    """
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # a tensor without values has no place; its storage is one object
            return id(storage) if storage.nbytes() else None
        return storage.data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


def run_watched(model: nn.Module, split: Iterable[nn.Parameter], example: dict[str, Any]) -> Dataflow:
    """Run one forward of a model in eval mode under dataflow analysis, with ``example`` as its keyword arguments.

    Seams are forwards set on module instances that have an attribute ``watch``. Random streams, training mode and
    gradients are restored. Collective over the tensor-parallel group if the model is split.
    """
    forwards = [vars(module).get("forward") for module in model.modules()]
    seams: list[Any] = [forward for forward in forwards if hasattr(forward, "watch")]
    training = model.training
    flow = Dataflow(model, split)
    try:
        model.eval()
        for seam in seams:
            seam.watch = flow
        with torch.random.fork_rng(), torch.enable_grad(), flow:
            model(**example)
    finally:
        model.train(training)
        flow.close()
        for seam in seams:
            seam.watch = None
    return flow

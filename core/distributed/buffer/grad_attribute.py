"""GradAttribute: ``.grad`` of a bucket's parameters, and the user's changes to it. No other file writes ``.grad``.

torch's rules hold: a backward adds to ``.grad``, None means no gradient, and an edit counts. While a gradient is in
flight, sharded or not scaled yet, ``.grad`` is a GradPlaceholder. An edit that cannot be followed is rejected.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from core.distributed.buffer.grad_placeholder import GradPlaceholder

# Context for code that reads attributes of many parameters but no values: a class check of each would be slow.
attributes_alone = torch._C.DisableTorchFunctionSubclass

_GRAD, _REQUIRES_GRAD, _TOUCHED = map(attrgetter, ("grad", "requires_grad", "touched"))
_WRITTEN = "grad_added_to_main_grad"  # set by a fused kernel of user code that has written the gradient into the buffer


class GradAttribute:
    """Manages ``.grad`` of a bucket's parameters.

    ``used`` has 1 for each parameter with a gradient in this step, on any rank once ranks have agreed.
    """

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str], dtype: torch.dtype) -> None:
        self.params = params
        self.names = names
        self.dtype = dtype
        self.used = bytearray(len(params))
        self.placeholders: list[GradPlaceholder] = []  # one for each parameter, created when first needed
        self.shown: Sequence[torch.Tensor] = ()  # tensors that `show` last put into `.grad`
        self.collected = bytearray(len(params))  # 1 where a placeholder took the place of a gradient of this step
        self.dropped: str | None = None  # a parameter whose gradient was dropped after its reduction had begun
        self.edited = False  # True if the user has written to reduced gradients of this step
        self.version = 0  # version counter of the reduced gradients when `show` put them into `.grad`
        for param in params:
            if param.grad_dtype is not dtype:  # autograd accumulates in this dtype
                param.grad = None
                param.grad_dtype = dtype

    # -- until gradients are reduced ----------------------------------------------------------------------------------

    def accumulate_into(self, views: Sequence[torch.Tensor]) -> None:
        """Let autograd add to these views; without views autograd creates a new tensor for each gradient."""
        for index, param in enumerate(self.params):
            wanted = views[index] if views and param.requires_grad else None
            if param.grad is not wanted:
                param.grad = wanted

    def begin(self, accumulates: bytes) -> None:
        """Begin a step that adds to the gradients with a 1 in ``accumulates``.

        If these are hidden, their placeholders stay, to show if the user drops them.
        """
        self.withdraw(accumulates if 1 in accumulates and self.is_hidden else b"")
        self.used[:] = accumulates
        self.dropped = None
        self.edited = False

    def hold(self, accumulates: bytes, *, apart: bool) -> dict[int, torch.Tensor]:
        """Return the gradients in ``.grad`` that the step adds to, by index; with ``apart``, in separate memory."""
        indices = [index for index, flag in enumerate(accumulates) if flag]
        for index in indices if apart else ():
            self.params[index].grad = self.shown[index].clone()
        held = ((index, self.params[index].grad) for index in indices)
        return {index: grad for index, grad in held if grad is not None}

    def take(self, index: int) -> torch.Tensor | None:
        """Return the gradient in ``.grad``; for a placeholder the gradient that autograd has added to it."""
        grad = self.params[index].grad
        return grad.added if type(grad) is GradPlaceholder else grad

    def collect(
        self,
        indices: Sequence[int],
        views: Sequence[torch.Tensor],
        without: Sequence[int] | None,
        *,
        watched: bool = True,
    ) -> None:
        """Copy gradients into ``views``, wherever the user or autograd stored them.

        ``without`` says of each parameter if it counts as used without a gradient now; None if an earlier microbatch
        has decided that. ``watched`` puts placeholders into ``.grad``, so that gradients which arrive before the
        reduction is done are detected. Pass False only if no user code runs until then.
        """
        if watched and not self.placeholders:
            self._make_placeholders()
        self.shown = self.placeholders if watched else views
        if len(indices) == len(self.params) and self._collect_at_once(views, watched=watched):
            return
        for index in indices:
            param, view, placed = self.params[index], views[index], self.shown[index]
            now = param.grad
            grad = (now.added if type(now) is GradPlaceholder else now) if param.requires_grad else None
            in_buffer = self.collected[index]
            if type(now) is GradPlaceholder and not in_buffer:
                now.reset()
            written = vars(param).get(_WRITTEN, False)
            if written:
                param.grad_added_to_main_grad = False
            if grad is None:
                if not in_buffer:
                    param.grad = None
                if not in_buffer and not written:
                    view.zero_()  # cleared by zero_grad(set_to_none=True), or frozen: it contributes zeros
                    if without is not None:
                        self.used[index] = without[index]
                continue
            if grad is not view:
                view.add_(dense(grad)) if in_buffer else view.copy_(dense(grad))
                self.used[index] = 1
            if not self.used[index]:
                param.grad = None
                continue
            if in_buffer and self._lacks_placeholder(index):
                self.dropped = self.dropped or self.names[index]
            if watched and placed.touched:
                placed.reset()
            try:
                param.grad = placed
                self.collected[index] = watched
            except RuntimeError:  # the dtype or device has changed since the wrap, which finalize rejects by name
                param.grad = None
                self.collected[index] = 0

    def _collect_at_once(self, views: Sequence[torch.Tensor], *, watched: bool) -> bool:
        """Handle the usual case, every gradient in its view, in a few C passes. Returns False in any other case."""
        if 0 in self.used or any(map(_TOUCHED, self.placeholders)):
            return False
        if not all(map(operator.is_, map(_GRAD, self.params), views)) or not all(map(_REQUIRES_GRAD, self.params)):
            return False
        if any([vars(param).get(_WRITTEN) for param in self.params]):
            return False
        try:
            for param, placeholder in zip(self.params, self.placeholders, strict=True) if watched else ():
                param.grad = placeholder
        except RuntimeError:  # another dtype or device than at the wrap
            return False
        self.collected = bytearray([watched]) * len(self.params)
        return True

    def withdraw(self, but: bytes = b"") -> None:
        """Leave only unreduced gradients in ``.grad``. A parameter with a 1 in ``but`` keeps its placeholder."""
        if 1 not in but:
            but = bytes(len(self.params))
        for param, stays in zip(self.params, but, strict=True):
            if type(param.grad) is GradPlaceholder and not stays:
                param.grad = param.grad.added
        for placeholder, stays in zip(self.placeholders, but, strict=False):
            if placeholder.touched and not stays:
                placeholder.reset()
        self.collected = bytearray(len(self.params))

    def has_dropped(self, index: int) -> bool:
        """Return True if the user dropped a gradient that ``begin`` kept. False for one that is already collected."""
        return not self.collected[index] and self._lacks_placeholder(index)

    def _lacks_placeholder(self, index: int) -> bool:
        """Return True if the user removed or zeroed the placeholder in a parameter's ``.grad``."""
        placeholder = self.placeholders[index]
        return self.params[index].grad is not placeholder or placeholder.zeroed

    def record_dropped(self) -> str | None:
        """Return the first parameter whose gradient was dropped by the user after it was collected in this step."""
        if self.dropped is None and 1 in self.collected and not self._untouched(self.placeholders):
            indices = range(len(self.params))
            dropped = (self.names[i] for i in indices if self.collected[i] and self._lacks_placeholder(i))
            self.dropped = next(dropped, None)
        return self.dropped

    @property
    def has_late(self) -> bool:
        """True if a hook, or the user, has put a gradient into ``.grad`` since the bucket was launched."""
        return not self._untouched(self.shown) and any(
            self._late(index) is not None for index in range(len(self.params))
        )

    def _late(self, index: int) -> torch.Tensor | None:
        return None if (grad := self.take(index)) is self.shown[index] else grad

    def take_late(self) -> list[tuple[int, torch.Tensor]]:
        """Return and forget (index, gradient) for each gradient that arrived after the bucket was launched."""
        found = [(index, grad) for index in range(len(self.params)) if (grad := self._late(index)) is not None]
        for placeholder in self.placeholders:
            placeholder.reset()
        return found

    # -- once gradients are reduced -----------------------------------------------------------------------------------

    def show(self, grads: Sequence[torch.Tensor] | None) -> None:
        """Put reduced gradients into ``.grad``, or placeholders if they are sharded or not scaled yet (None).

        A parameter that no rank has used gets None, so that torch's optimizers skip it.
        """
        if grads is None and not self.placeholders:
            self._make_placeholders()
        self.shown = self.placeholders if grads is None else grads
        self.version = 0 if grads is None else grads[0]._version  # all views of a buffer share it
        if 0 not in self.used and all(map(_REQUIRES_GRAD, self.params)):
            if not self._untouched(self.shown):
                for param, grad in zip(self.params, self.shown, strict=True):
                    param.grad = grad
            return
        for param, grad, used in zip(self.params, self.shown, self.used, strict=True):
            wanted = grad if param.requires_grad and used else None
            if param.grad is not wanted:
                param.grad = wanted

    @property
    def is_hidden(self) -> bool:
        """True if ``show`` or ``collect`` has put placeholders into ``.grad``."""
        return self.shown is self.placeholders

    @property
    def accumulates(self) -> bytes:
        """1 for each parameter whose reduced gradient is still in ``.grad``, so that the next backward adds to it."""
        grads = zip(self.params, self.shown, self.used, strict=True)
        return bytes(used and param.grad is grad and not getattr(grad, "zeroed", False) for param, grad, used in grads)

    @torch.no_grad()
    def follow_edits(self) -> str | None:
        """Copy the user's edits of ``.grad`` into the buffer, or return why an edit cannot be followed."""
        hidden = self.shown is self.placeholders
        self.edited = self.edited or not (hidden or self.shown[0]._version == self.version)
        if self._untouched(self.shown):
            return None
        self.edited = True
        for index, (param, grad) in enumerate(zip(self.params, self.shown, strict=True)):
            now = param.grad
            unedited = now is grad and not (hidden and self.placeholders[index].added is not None)
            if unedited or not param.requires_grad or (now is None and not self.used[index]):
                continue
            if hidden:
                return self._refusal(index, "set to None" if now is None else "added to" if now is grad else "replaced")
            self.used[index] = now is not None  # without a gradient it is not updated, as with torch
            grad.zero_() if now is None else grad.copy_(dense(now))
            param.grad = None if now is None else grad
        return None

    def take_zeroed(self) -> list[int]:
        """Return and forget the parameters whose placeholder was zeroed since ``show``."""
        if self.shown is not self.placeholders:
            return []
        zeroed = [index for index, placeholder in enumerate(self.placeholders) if placeholder.zeroed]
        for index in zeroed:
            self.placeholders[index].reset()
        return zeroed

    def _refusal(self, index: int, what: str) -> str:
        return (
            f"the `.grad` of {self.names[index]!r} was {what} after finalize_model_grads, and its gradient is not "
            "there: it is sharded, or scaled in the optimizer. Drop gradients with zero_grad() of the optimizer; to "
            "edit them, call finalize_model_grads(..., force_all_reduce=True) and leave scale_in_optimizer False"
        )

    def _make_placeholders(self) -> None:
        pairs = zip(self.params, self.names, strict=True)
        self.placeholders = [GradPlaceholder.of(param, name, self.dtype, self) for param, name in pairs]

    def _untouched(self, grads: Sequence[torch.Tensor]) -> bool:
        """Check in one C pass that each tensor is in its parameter's ``.grad`` and that no placeholder was added to."""
        in_place = all(map(operator.is_, map(_GRAD, self.params), grads))
        return in_place and not any(map(_TOUCHED, self.placeholders))


def dense(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a dense tensor."""
    return grad.to_dense() if grad.is_sparse else grad


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method so that the wrapper keeps no reference to the object and does nothing once it is deleted.

    Hooks of autograd, or of all modules, may outlive the object.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments)

    return call


def call_after_backward(action: Callable[[], None]) -> bool:
    """Run a function when the running backward has ended.

    Returns False if no backward is running. The function is then never called.
    """
    try:
        torch.autograd.Variable._execution_engine.queue_callback(action)
    except RuntimeError:  # gradients that arrive outside a backward, such as delayed weight gradients
        return False
    return True


def backward_runs() -> bool:
    """Return True while a backward of this thread runs, in a hook or a recomputed forward."""
    return call_after_backward(lambda: None)

"""GradAttribute: `.grad` of a bucket's parameters, and what users have done to it. No other file writes `.grad`.

torch's rules hold: a backward adds to what is there, None is no gradient, an edit counts. While a gradient is in
flight, sharded or still to be scaled, a GradPlaceholder stands for it. An edit that cannot be followed is refused.
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

# Surrounds what reads attributes of many parameters and no values, where asking the class of each would take long.
attributes_alone = torch._C.DisableTorchFunctionSubclass

_GRAD, _REQUIRES_GRAD, _TOUCHED = map(attrgetter, ("grad", "requires_grad", "touched"))
_WRITTEN = "grad_added_to_main_grad"  # set by a fused kernel of user code that has written the gradient into the buffer


class GradAttribute:
    """Writes `.grad` of `params`; `names` are for messages.

    used: 1 for each parameter with a gradient in this step, on this rank, and once ranks have agreed on any of them.
    """

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str], dtype: torch.dtype) -> None:
        self.params = params
        self.names = names
        self.dtype = dtype
        self.used = bytearray(len(params))
        self.placeholders: list[GradPlaceholder] = []  # one for each parameter, made when first needed
        self.shown: Sequence[torch.Tensor] = ()  # what `show` has last put into `.grad`
        self.collected = bytearray(len(params))  # 1 where a placeholder took the place of a gradient of this step
        self.dropped: str | None = None  # a parameter whose gradient was dropped after its reduction had begun
        self.edited = False  # True if the user has written to reduced gradients of this step
        self.version = 0  # of the memory of reduced gradients, when `show` put them into `.grad`
        for param in params:
            if param.grad_dtype is not dtype:  # autograd accumulates in this dtype
                param.grad = None
                param.grad_dtype = dtype

    # -- until gradients are reduced ----------------------------------------------------------------------------------

    def accumulate_into(self, views: Sequence[torch.Tensor]) -> None:
        """Have autograd add to these views; where there are none, autograd makes a fresh tensor of each gradient."""
        for index, param in enumerate(self.params):
            wanted = views[index] if views and param.requires_grad else None
            if param.grad is not wanted:
                param.grad = wanted

    def begin(self, accumulates: bytes) -> None:
        """Begin a step. Placeholders of gradients it adds to (1 in `accumulates`) stay, to show what is dropped."""
        self.withdraw(accumulates if 1 in accumulates and self.is_hidden else b"")
        self.used[:] = accumulates
        self.dropped = None
        self.edited = False

    def hold(self, accumulates: bytes, *, apart: bool) -> dict[int, torch.Tensor]:
        """The gradients in `.grad` where `accumulates` is 1. apart: give them memory of their own."""
        indices = [index for index, flag in enumerate(accumulates) if flag]
        for index in indices if apart else ():
            self.params[index].grad = self.shown[index].clone()
        held = ((index, self.params[index].grad) for index in indices)
        return {index: grad for index, grad in held if grad is not None}

    def take(self, index: int) -> torch.Tensor | None:
        """The gradient in `.grad`; of a placeholder what autograd has added to it."""
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
        """Bring gradients into `views`, wherever the user or autograd left them.

        watched: put placeholders into `.grad`, so that what comes until the reduction is done is noticed; without, no
        code of the user runs until then. without: for each parameter whether it counts as used where it has no gradient
        now; None if an earlier microbatch has decided that.
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
                    view.zero_()  # emptied by zero_grad(set_to_none=True), or frozen: it contributes zeros
                    if without is not None:
                        self.used[index] = without[index]
                continue
            if grad is not view:
                view.add_(dense(grad)) if in_buffer else view.copy_(dense(grad))
                self.used[index] = 1
            if not self.used[index]:
                param.grad = None
                continue
            if in_buffer and now is not placed:
                self.dropped = self.dropped or self.names[index]
            if watched and placed.touched:
                placed.reset()
            try:
                param.grad = placed
                self.collected[index] = watched
            except RuntimeError:  # the dtype or device has changed since the wrap, which finalize refuses by name
                param.grad = None
                self.collected[index] = 0

    def _collect_at_once(self, views: Sequence[torch.Tensor], *, watched: bool) -> bool:
        """The usual case in a few C passes: each gradient lies in its view. False where one does not."""
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
        """Leave in `.grad` only what is not reduced yet. but: 1 for each parameter whose placeholder stays."""
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
        """True if the user has dropped a gradient that `begin` has kept. False for one that is collected by now."""
        placeholder = self.placeholders[index]
        dropped = self.params[index].grad is not placeholder or placeholder.zeroed
        return dropped and not self.collected[index]

    def note_dropped(self) -> str | None:
        """The first parameter whose gradient the user has dropped after it was collected; remembered for the step."""
        if 1 in self.collected and not self._untouched(self.placeholders):
            for index, placeholder in enumerate(self.placeholders):
                if self.collected[index] and (self.params[index].grad is not placeholder or placeholder.zeroed):
                    self.dropped = self.dropped or self.names[index]
        return self.dropped

    @property
    def has_late(self) -> bool:
        """True if a hook, or the user, has put a gradient into `.grad` since the bucket was launched."""
        return not self._untouched(self.shown) and any(
            self._late(index) is not None for index in range(len(self.params))
        )

    def _late(self, index: int) -> torch.Tensor | None:
        return None if (grad := self.take(index)) is self.shown[index] else grad

    def take_late(self) -> list[tuple[int, torch.Tensor]]:
        """(index, gradient) of what came after the bucket was launched; forgotten here."""
        found = [(index, grad) for index in range(len(self.params)) if (grad := self._late(index)) is not None]
        for placeholder in self.placeholders:
            placeholder.reset()
        return found

    # -- once gradients are reduced -----------------------------------------------------------------------------------

    def show(self, grads: Sequence[torch.Tensor] | None) -> None:
        """Put reduced gradients into `.grad`, or placeholders where they are sharded or still to be scaled (None).

        A parameter that no rank has used gets None, so that torch's optimizers leave it alone.
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
        """True if `show` or `collect` has put placeholders into `.grad`."""
        return self.shown is self.placeholders

    @property
    def accumulates(self) -> bytes:
        """1 for each parameter whose reduced gradient is still in `.grad`, so that the next backward adds to it."""
        grads = zip(self.params, self.shown, self.used, strict=True)
        return bytes(used and param.grad is grad and not getattr(grad, "zeroed", False) for param, grad, used in grads)

    @torch.no_grad()
    def follow_edits(self) -> str | None:
        """Copy the user's edits of `.grad` into the buffer. Returns why an edit cannot be followed, in words."""
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
        """The parameters whose placeholder was zeroed since `show`; forgotten here."""
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
        """True if each of these is in its parameter's `.grad`, and nothing was added to a placeholder. One C pass."""
        in_place = all(map(operator.is_, map(_GRAD, self.params), grads))
        return in_place and not any(map(_TOUCHED, self.placeholders))


def dense(grad: torch.Tensor) -> torch.Tensor:
    """A gradient as it lies in a buffer, if it is sparse."""
    return grad.to_dense() if grad.is_sparse else grad


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Call the method of an object as long as it lives: a hook of autograd, or of all modules, may outlive it."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments)

    return call


def call_after_backward(action: Callable[[], None]) -> bool:
    """Have something done when the running backward pass has ended; False where none is running."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(action)
    except RuntimeError:  # gradients that are announced outside of a backward, such as weight gradients put off
        return False
    return True


def backward_runs() -> bool:
    """True while a backward of this thread runs: in a hook of it, or in a forward that it repeats."""
    return call_after_backward(lambda: None)

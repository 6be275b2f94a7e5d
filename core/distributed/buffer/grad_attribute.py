"""GradAttribute: what stands in `.grad` of a bucket's parameters, and what users have done to it.

torch's rules hold: a backward adds to what is there, None is no gradient, an edit counts. Where a gradient is in
flight, sharded or still to be scaled, a placeholder stands for it, and what cannot be followed is said in words.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import nn

from core.agree import SyncError
from core.distributed.buffer.grad_placeholder import GradPlaceholder
from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.layout.param_layout import BucketLayout

_GRAD, _REQUIRES_GRAD, _TOUCHED = map(attrgetter, ("grad", "requires_grad", "touched"))


class BucketState(Enum):
    """Where a bucket's gradients are on their way from autograd to the optimizer."""

    ACCUMULATING = "accumulating"  # autograd adds this rank's gradients
    IN_FLIGHT = "in flight"  # a collective owns the memory
    REDUCED = "reduced"  # whole over the data group; sync rules may still be due
    FINAL = "final"  # ready for the optimizer


class GradAttribute(ABC):
    """The part of a bucket that knows `.grad`; Bucket sets what is declared here."""

    layout: BucketLayout
    dtype: torch.dtype
    params: list[nn.Parameter]
    contracts: list[GradientContract]
    views: list[torch.Tensor]
    state: BucketState
    full: bool
    pending_scale: float | torch.Tensor

    def __init__(self, count: int) -> None:
        # 1 for each parameter with a gradient in this step: on this rank, and once ranks have agreed on any of them.
        self.used = bytearray(count)
        self.placeholders: list[GradPlaceholder] = []  # for each parameter, made when first needed
        self.shown: Sequence[torch.Tensor] = ()  # what `attach` has last put into `.grad`: views or placeholders
        self.placed = bytearray(count)  # 1 where the placeholder took the place of a gradient of this step
        self.dropped: str | None = None  # a parameter whose gradient was dropped after its reduction had begun
        self.carried: torch.Tensor | None = None  # [shard], reduced gradients that this step adds to
        self.carries = bytes(count)  # 1 for each parameter of which `carried` holds a gradient

    @property
    @abstractmethod
    def shard_range(self) -> tuple[int, int]:
        """[start, end) within the bucket that this rank owns."""

    @property
    @abstractmethod
    def owned_grad(self) -> torch.Tensor:
        """The part of the bucket that this rank's optimizer updates."""

    @property
    @abstractmethod
    def scale_is_due(self) -> bool:
        """True if a factor is left that nobody has taken."""

    @abstractmethod
    def valid_part(self, index: int) -> torch.Tensor:
        """The flat part of parameter `index`'s gradient that is valid here."""

    def attach(self) -> None:
        """Set every parameter's `.grad`: its view of the buffer, or a GradPlaceholder where a shard alone is valid, or
        where the gradient is still to be scaled.

        After the reduction it is None for a parameter that no rank has used: torch's optimizers then leave it alone.
        """
        accumulating = self.state is BucketState.ACCUMULATING
        true = accumulating or (self.full and not self.scale_is_due)
        self.shown = self.views if true else self._placeholders()
        if self._untouched(self.shown) and 0 not in self.used and all(map(_REQUIRES_GRAD, self.params)):
            return
        for param, grad, used in zip(self.params, self.shown, self.used, strict=True):
            wanted = grad if param.requires_grad and (used or accumulating) else None
            if param.grad is not wanted:
                param.grad = wanted

    def _placeholders(self) -> list[GradPlaceholder]:
        if not self.placeholders:
            named = zip(self.params, self.contracts, strict=True)
            self.placeholders = [GradPlaceholder.of(param, contract.name, self.dtype) for param, contract in named]
        return self.placeholders

    def _untouched(self, grads: Sequence[torch.Tensor]) -> bool:
        """True if each of these is in its parameter's `.grad`, and nothing was added to a placeholder. One C pass."""
        in_place = all(map(operator.is_, map(_GRAD, self.params), grads))
        return in_place and not any(map(_TOUCHED, self.placeholders))

    def _take(self, index: int) -> torch.Tensor | None:
        """What is in `.grad`: for a placeholder, what autograd has added to it."""
        grad = self.params[index].grad
        return grad.added if type(grad) is GradPlaceholder else grad

    def _forget_touches(self) -> None:
        if any(map(_TOUCHED, self.placeholders)):
            for placeholder in self.placeholders:
                placeholder.reset()

    def note_dropped(self) -> None:
        """Note that the user has dropped a gradient which was collected: its reduction cannot be taken back."""
        if 1 not in self.placed or self._untouched(self.placeholders):
            return
        for index, (param, placed) in enumerate(zip(self.params, self.placed, strict=True)):
            if placed and (param.grad is not self.placeholders[index] or self.placeholders[index].zeroed):
                self.dropped = self.dropped or self.contracts[index].name

    @property
    def kept(self) -> bytes:
        """1 for each parameter whose reduced gradient is still in `.grad`, so that the next backward adds to it."""
        if self.state is BucketState.ACCUMULATING:
            return bytes(len(self.params))
        grads = zip(self.params, self.shown, self.used, strict=True)
        return bytes(used and param.grad is grad and not getattr(grad, "zeroed", False) for param, grad, used in grads)

    @torch.no_grad()
    def _carry(self, kept: bytes) -> None:
        """Copy this rank's shard of the reduced gradients that nobody has dropped.

        Gradients that are not sharded need no copy: autograd adds to them where they lie.
        """
        for param, placeholder in zip(self.params, self.placeholders, strict=False):
            if param.grad is placeholder:
                param.grad = placeholder.added
        if self.full or not any(kept):
            return
        self.carries = kept
        low, high = self.shard_range
        self.carried = torch.zeros_like(self.owned_grad)
        for slot, keep in zip(self.layout.slots, kept, strict=True):
            start, end = max(slot.start - self.layout.start, low) - low, min(slot.end - self.layout.start, high) - low
            if keep and start < end:
                self.carried[start:end] = self.owned_grad[start:end] * self.pending_scale

    @torch.no_grad()
    def follow_edits(self) -> str | None:
        """Take over what the user did to `.grad` since the reduction; an edit that a shard cannot follow, in words."""
        if self._untouched(self.shown):
            return None
        hidden = self.shown is self.placeholders
        for index, (param, grad) in enumerate(zip(self.params, self.shown, strict=True)):
            now = param.grad
            untouched = now is grad and getattr(now, "added", None) is None
            if untouched or not param.requires_grad or (now is None and not self.used[index]):
                continue
            if hidden:
                what = "set to None" if now is None else "added to" if now is grad else "replaced"
                return (
                    f"the `.grad` of {self.contracts[index].name!r} was {what} after finalize_model_grads, and its "
                    "gradient is not there: it is sharded, or scaled in the optimizer. Drop gradients with zero_grad() "
                    "of the optimizer; to edit them, call finalize_model_grads(..., force_all_reduce=True) and leave "
                    "scale_in_optimizer False"
                )
            self.used[index] = now is not None  # without a gradient it is not updated, as with torch
            self.views[index].zero_() if now is None else self.views[index].copy_(dense(now))
            param.grad = None if now is None else self.views[index]
        for index, placeholder in enumerate(self.placeholders if hidden else ()):
            if placeholder.zeroed:
                self.valid_part(index).zero_()
                placeholder.reset()
        return None

    def take_edits(self) -> None:
        """`follow_edits`; raises SyncError for one that cannot be followed."""
        problem = self.follow_edits()
        if problem is not None:
            raise SyncError(f"rank {dist.get_rank()}: {problem}")


def dense(grad: torch.Tensor) -> torch.Tensor:
    """A gradient as it lies in a buffer, if it is sparse."""
    return grad.to_dense() if grad.is_sparse else grad

"""Position in a cycle of microbatches, shared by the wrappers of core.gradient_accumulation. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class AccumulationError(RuntimeError):
    """Error raised for a call that would mix gradients of two cycles, or use them before they are fully reduced."""


class Accumulation:
    """Counter of a cycle: accumulating while ``count < size``, then due until the optimizer has stepped.

    A backward starts a new microbatch if a batch was drawn or ``step`` was called since the last one. If no batch is
    ever drawn from the wrapped loader, every backward is a microbatch.
    """

    def __init__(self, size: int) -> None:
        self.size = checked_size(size)
        self.count = 0  # microbatches of this cycle whose gradients are in `.grad`
        self.fresh = True  # True if the next backward begins a microbatch
        self.has_loader = False  # True once a batch was drawn from a loader of ours
        self.drawn_ahead = 0  # batches since the last backward
        self.drawn_for_this = 0  # batches for the current microbatch
        self.tokens: float | None = None  # tokens of this cycle on this rank, if losses are sums over tokens
        self.reduced = False  # True once this cycle's gradients are reduced, scaled or clipped
        self.handlers = 0  # number of handlers that share this state, and must run before a step
        self.handled: set[int] = set()
        self.schedule_due = False  # True while the scheduler has not followed an update
        self.optimizer: Callable[[], Any] = _no_optimizer  # a weak reference to the GradAccumOptimizer

    @property
    def is_due(self) -> bool:
        """True if all microbatches of the cycle are accumulated."""
        return self.count == self.size

    @property
    def is_last(self) -> bool:
        """True if the current or next microbatch is the last of the cycle."""
        return self.count + self.fresh >= self.size

    def drew(self) -> None:
        """Record that a batch was drawn, so that the next backward starts a microbatch."""
        self.has_loader = True
        self.drawn_ahead += 1
        self.fresh = True
        self._changed()

    def expect_backward(self) -> None:
        """Raise AccumulationError if a backward now would corrupt gradients of a due step."""
        if self.reduced or self.handled:
            raise AccumulationError(
                "backward() came after this cycle's gradients were reduced or clipped; call optimizer.step() first"
            )
        if self.is_due and self.fresh:
            raise AccumulationError(
                f"{self.size} microbatches are accumulated and another backward() came without optimizer.step(). Call "
                "step() after every microbatch (it does nothing until a step is due), or discard() to drop them. Two "
                "losses of one microbatch count once only if batches are drawn from the loader that was returned"
            )
        if not self.fresh and self.drawn_for_this > 1:
            logger.warning(
                "%d batches were drawn before several backwards; these count as one microbatch. Draw one batch for "
                "each microbatch, or call optimizer.step() after each backward",
                self.drawn_for_this,
            )
            self.drawn_for_this = 1

    def backward_done(self, num_tokens: float | None) -> None:
        """Record that a backward has accumulated its gradients, with the microbatch's tokens if its loss is a sum over
        tokens.
        """
        if self.fresh:
            self.count += 1
            self.drawn_for_this = self.drawn_ahead
            if num_tokens is not None:
                self.tokens = (self.tokens or 0) + num_tokens
        self.drawn_ahead = 0
        self.fresh = not self.has_loader
        self._changed()

    def stepped(self) -> None:
        """Record a call of ``step`` with nothing due, so that the next backward starts a microbatch."""
        self.fresh = True
        self._changed()

    def updated(self, *, made: bool) -> None:
        """End the cycle. ``made`` is ``False`` if the optimizer skipped the step (overflow)."""
        self.schedule_due = self.schedule_due or made
        self.begin()

    def counted_call(self) -> bool:
        """Count a call of a wrapper without an optimizer, and return ``True`` for every ``size``-th call."""
        self.count = (self.count + 1) % self.size
        return self.count == 0

    def begin(self) -> None:
        """Start a new cycle."""
        self.count, self.fresh, self.tokens, self.reduced = 0, True, None, False
        self.handled.clear()
        self._changed()

    def finalize(self) -> None:
        """Let the optimizer reduce gradients that core's wrapper has left to it."""
        if (optimizer := self.optimizer()) is not None:
            optimizer.finalize()

    def _changed(self) -> None:
        if (optimizer := self.optimizer()) is not None:
            optimizer.hold_reductions()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handled": set(self.handled), "optimizer": _no_optimizer}  # a copy has no optimizer


def _no_optimizer() -> None:
    """Placeholder for a weak reference."""


def checked_size(size: int) -> int:
    """Return ``accumulate_size``. Raises TypeError if it is not an integer, and ValueError if it is below 1."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"accumulate_size is {size!r}; it must be an integer")
    if size < 1:
        raise ValueError(f"accumulate_size is {size}; it must be at least 1 (1 steps on every microbatch)")
    return size


def shared_state(state: Accumulation | None, size: int) -> Accumulation:
    """Return the state shared with other wrappers, or a new one. Raises ValueError if the sizes differ."""
    if state is None:
        return Accumulation(size)
    if state.size != checked_size(size):
        raise ValueError(f"accumulate_size is {size} here and {state.size} in the accumulation that is shared")
    return state


class StandIn:
    """Proxy for another object. Attributes not defined here are read from it."""

    _inner: str  # name of the attribute with the other object

    def __getattr__(self, name: str) -> Any:
        # A copy is made without __init__, and special methods are not looked up here.
        if self._inner not in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__[self._inner], name)

"""Gradient accumulation: an optimizer, loader, handlers and scheduler that act once in `accumulate_size` microbatches.

One `Accumulation` knows where the cycle stands, and the four wrappers read it; only backwards move it. A batch that is
skipped moves nothing, and a second backward on the same batch belongs to the same microbatch. So the wrappers cannot
disagree about when a step is due.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from core.gradient_accumulation.cycle import Accumulation, AccumulationError, StandIn, checked_size, shared_state
from core.gradient_accumulation.grad_accum_optimizer import GradAccumOptimizer
from core.gradient_handler.base import BaseGradientHandler

__all__ = [
    "Accumulation",
    "AccumulationError",
    "GradAccumDataloader",
    "GradAccumGradientHandler",
    "GradAccumLrSchedulerByStep",
    "GradAccumOptimizer",
    "accumulate_gradient",
]


def accumulate_gradient(
    model: nn.Module,
    optimizer: Any,
    dataloader: Iterable[Any],
    accumulate_size: int,
    gradient_handlers: Sequence[BaseGradientHandler] | None = None,
    lr_scheduler: Any = None,
) -> tuple[
    GradAccumOptimizer, GradAccumDataloader, list[GradAccumGradientHandler] | None, GradAccumLrSchedulerByStep | None
]:
    """Make a loop's objects accumulate over `accumulate_size` microbatches. The loop is unchanged.

        optimizer, loader, _, scheduler = accumulate_gradient(
            model, optimizer, loader, 4, lr_scheduler=scheduler
        )
        for inputs, targets in loader:
            optimizer.zero_grad()
            optimizer.backward(loss_of(model(inputs), targets))
            optimizer.step()
            scheduler.step()

    model: plain, or in torch's or core's DistributedDataParallel, which then reduces once a cycle. It is not wrapped.
    Returns (optimizer, dataloader, gradient_handlers, lr_scheduler); what was None stays None.
    Raises ValueError or TypeError for a size that is no integer of at least 1, and for handlers that are no list of
    handlers.
    """
    state = Accumulation(accumulate_size)
    handlers = None
    if gradient_handlers is not None:
        if not isinstance(gradient_handlers, (list, tuple)):
            raise TypeError(f"expected gradient_handlers to be a list, but got {type(gradient_handlers).__name__}")
        handlers = [GradAccumGradientHandler(handler, accumulate_size, state=state) for handler in gradient_handlers]
    averaging = next((h for h in gradient_handlers or () if hasattr(type(h), "data_group")), None)
    accumulating = GradAccumOptimizer(
        optimizer,
        accumulate_size,
        model,
        state=state,
        data_group=None if averaging is None else lambda: averaging.data_group,
    )
    loader = GradAccumDataloader(dataloader, accumulate_size, state=state)
    scheduler = None
    if lr_scheduler is not None:
        scheduler = GradAccumLrSchedulerByStep(lr_scheduler, accumulate_size, state=state)
    return accumulating, loader, handlers, scheduler


# -- the loader, the scheduler and the handlers ---------------------------------------------------------------------


class GradAccumDataloader(StandIn):
    """Drops the batches at the end of an epoch that make no whole cycle.

    Of 10 batches and a size of 4, 8 are given. What a loader that is not torch's has left by its length, and its end,
    are then consumed, when the batch after the last one is asked for. An iterable without a length, endless or not, is
    read one cycle ahead. Iterators are independent of each other.
    """

    _inner = "dataloader"

    def __init__(self, dataloader: Iterable[Any], accumulate_size: int, *, state: Accumulation | None = None) -> None:
        self.accumulation = shared_state(state, accumulate_size)
        self.dataloader = dataloader
        self._position = 0  # batches given in this epoch
        self._resume_at = 0

    def __len__(self) -> int:
        length = len(self.dataloader)  # type: ignore[arg-type]
        return length - length % self.accumulation.size

    def __iter__(self) -> Iterator[Any]:
        skipped, self._resume_at = self._resume_at, 0
        for position, batch in enumerate(self._whole_cycles()):
            if position >= skipped:
                self._position = position + 1
                self.accumulation.drew()
                yield batch
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """Number of batches of this epoch that were given."""
        return {"position": self._position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Skip, in the next epoch that is begun, what was given before. The loader must give the same order again."""
        self._position = self._resume_at = int(state_dict["position"])

    def _whole_cycles(self) -> Iterator[Any]:
        size = self.accumulation.size
        iterator = iter(self.dataloader)
        try:
            length = len(self.dataloader)  # type: ignore[arg-type]
        except TypeError:
            while len(cycle := list(itertools.islice(iterator, size))) == size:
                yield from cycle
            return
        given = 0
        for batch in itertools.islice(iterator, length - length % size):
            yield batch
            given += 1
        if given == length - length % size and not isinstance(self.dataloader, DataLoader):
            # One more than is left, because some loaders rewind when they have said that they are at the end; no more
            # than that, because an endless one never says so.
            collections.deque(itertools.islice(iterator, length % size + 1), maxlen=0)


class GradAccumLrSchedulerByStep(StandIn, LRScheduler):
    """Steps the inner scheduler once for an update of the parameters, however often and whenever it is called.

    Made alone, without the optimizer's `state`, it steps on every `accumulate_size`-th call, unless the optimizer of
    the scheduler says `step_was_skipped` (a loss scale's overflow; all optimizers of this package do).
    """

    _inner = "lr_scheduler"

    def __init__(self, lr_scheduler: Any, accumulate_size: int, *, state: Accumulation | None = None) -> None:
        self.accumulation = shared_state(state, accumulate_size)
        self.alone = state is None
        self.lr_scheduler = lr_scheduler

    @staticmethod
    def compute_effective_steps_per_epoch(dataloader: Any, accumulate_size: int) -> int:
        """Updates in an epoch: what a schedule's total steps are counted in."""
        return len(dataloader) // checked_size(accumulate_size)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the inner scheduler if the parameters were updated since the last time."""
        state = self.accumulation
        if self.alone:
            driven = getattr(self.lr_scheduler, "optimizer", None)
            state.schedule_due = state.counted_call() and not getattr(driven, "step_was_skipped", False)
        if state.schedule_due:
            state.schedule_due = False
            self.lr_scheduler.step(*args, **kwargs)

    def get_lr(self) -> list[float]:
        """The inner scheduler's."""
        rates: list[float] = self.lr_scheduler.get_lr()
        return rates

    def get_last_lr(self) -> list[float]:
        """The inner scheduler's."""
        rates: list[float] = self.lr_scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The inner scheduler's, with the number of calls since its last step where this one counts calls."""
        count = {"accumulate_step": self.accumulation.count} if self.alone else {}
        return {**self.lr_scheduler.state_dict(), **count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called. Also takes the inner scheduler's alone."""
        inner = dict(state_dict)
        count = inner.pop("accumulate_step", 0)
        if self.alone:
            self.accumulation.count = count
        self.lr_scheduler.load_state_dict(inner)


class GradAccumGradientHandler(BaseGradientHandler):
    """Runs the inner handler once a cycle, when a step is due; a second call in a cycle does nothing.

    Made alone, without the optimizer's `state`, it runs on every `accumulate_size`-th call.
    """

    def __init__(
        self, grad_handler: BaseGradientHandler, accumulate_size: int, *, state: Accumulation | None = None
    ) -> None:
        if not isinstance(grad_handler, BaseGradientHandler) or isinstance(grad_handler, GradAccumGradientHandler):
            raise TypeError(
                f"expected grad_handler to be type BaseGradientHandler, but got {type(grad_handler).__name__}"
            )
        super().__init__(grad_handler._model, grad_handler._optimizer)
        self.accumulation = shared_state(state, accumulate_size)
        self.alone = state is None
        self.grad_handler = grad_handler
        self.number = self.accumulation.handlers
        self.accumulation.handlers += 1

    def handle_gradient(self) -> None:
        """Reduce the accumulated gradient if a step is due. Collective then."""
        state = self.accumulation
        if self.alone:
            if state.counted_call():
                self.grad_handler.handle_gradient()
        elif state.is_due and self.number not in state.handled:
            state.finalize()
            self.grad_handler.handle_gradient()
            state.handled.add(self.number)

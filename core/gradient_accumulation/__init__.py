"""Gradient accumulation: an optimizer, loader, handlers and scheduler that act once per cycle of microbatches.

The four wrappers share one ``Accumulation`` with the position in the cycle, which only backward passes advance. A
skipped batch changes nothing, and a second backward on the same batch belongs to the same microbatch. So the wrappers
always agree on when a step is due.
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
    """Wrap the objects of a training loop to accumulate over ``accumulate_size`` microbatches. The loop is unchanged.

    Use it to train with a larger batch than fits into memory. Gradients are reduced once per cycle instead of once per
    microbatch.

        optimizer, loader, _, scheduler = accumulate_gradient(
            model, optimizer, loader, 4, lr_scheduler=scheduler
        )
        for inputs, targets in loader:
            optimizer.zero_grad()
            optimizer.backward(loss_of(model(inputs), targets))
            optimizer.step()
            scheduler.step()

    Args:
        model (Module): A plain module, or one in torch's or core's DistributedDataParallel, which then reduces once per
            cycle. It is not wrapped.
        optimizer (Optimizer): See ``GradAccumOptimizer``.
        dataloader (Iterable[Any]): Iterable of microbatches.
        accumulate_size (int): Number of microbatches per step.
        gradient_handlers (Sequence[BaseGradientHandler], optional): List of handlers.
        lr_scheduler (LRScheduler, optional): A torch scheduler.

    Returns:
        The wrapped (optimizer, dataloader, gradient_handlers, lr_scheduler). ``None`` stays ``None``.

    Raises:
        ValueError: If the size is below 1.
        TypeError: If the size is not an integer, or ``gradient_handlers`` is not a list of handlers.
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
    """Data loader that drops the last batches of an epoch if they do not complete a cycle.

    Of 10 batches with a size of 4, it yields 8. After the last one, it also consumes the remaining batches (by length)
    and the end of a loader that is not torch's. An iterable without a length, endless or not, is read one cycle ahead.
    Iterators are independent of each other.

    Args:
        dataloader (Iterable[Any]): Iterable of microbatches.
        accumulate_size (int): Number of microbatches per step.
        state (Accumulation, optional): State shared with the other wrappers.
    """

    _inner = "dataloader"

    def __init__(self, dataloader: Iterable[Any], accumulate_size: int, *, state: Accumulation | None = None) -> None:
        self.accumulation = shared_state(state, accumulate_size)
        self.dataloader = dataloader
        self._position = 0  # batches yielded in this epoch
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
        """Return the number of batches yielded in this epoch."""
        return {"position": self._position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Skip the batches yielded before, in the next epoch that starts.

        The loader must produce the same order again.
        """
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
            # Read one more than remain, because some loaders rewind when they signal their end; not more, because an
            # endless loader never does.
            collections.deque(itertools.islice(iterator, length % size + 1), maxlen=0)


class GradAccumLrSchedulerByStep(StandIn, LRScheduler):
    """LR scheduler wrapper that steps once per parameter update, regardless of how often and when it is called.

    Args:
        lr_scheduler (LRScheduler): A torch scheduler.
        accumulate_size (int): Number of microbatches per step.
        state (Accumulation, optional): State shared with the other wrappers. Without it, the wrapper steps on every
            ``accumulate_size``-th call, unless the scheduler's optimizer has ``step_was_skipped`` set (after an
            overflow; all optimizers of this package set it).
    """

    _inner = "lr_scheduler"

    def __init__(self, lr_scheduler: Any, accumulate_size: int, *, state: Accumulation | None = None) -> None:
        self.accumulation = shared_state(state, accumulate_size)
        self.alone = state is None
        self.lr_scheduler = lr_scheduler

    @staticmethod
    def compute_effective_steps_per_epoch(dataloader: Any, accumulate_size: int) -> int:
        """Return the number of updates per epoch, the unit of a schedule's total steps.

        Args:
            dataloader (DataLoader): Loader of microbatches, with a length.
            accumulate_size (int): Number of microbatches per step.
        """
        return len(dataloader) // checked_size(accumulate_size)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the inner scheduler if the parameters were updated since the last step."""
        state = self.accumulation
        if self.alone:
            driven = getattr(self.lr_scheduler, "optimizer", None)
            state.schedule_due = state.counted_call() and not getattr(driven, "step_was_skipped", False)
        if state.schedule_due:
            state.schedule_due = False
            self.lr_scheduler.step(*args, **kwargs)

    def get_lr(self) -> list[float]:
        """Return the learning rates of the inner scheduler."""
        rates: list[float] = self.lr_scheduler.get_lr()
        return rates

    def get_last_lr(self) -> list[float]:
        """Return the last learning rates of the inner scheduler."""
        rates: list[float] = self.lr_scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the inner scheduler's state, with the number of calls since its last step if calls are counted."""
        count = {"accumulate_step": self.accumulation.count} if self.alone else {}
        return {**self.lr_scheduler.state_dict(), **count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state from ``state_dict``, or a state of only the inner scheduler."""
        inner = dict(state_dict)
        count = inner.pop("accumulate_step", 0)
        if self.alone:
            self.accumulation.count = count
        self.lr_scheduler.load_state_dict(inner)


class GradAccumGradientHandler(BaseGradientHandler):
    """Gradient handler wrapper that runs once per cycle, when a step is due. A second call in a cycle is a no-op.

    Args:
        grad_handler: The inner handler.
        accumulate_size: Number of microbatches per step.
        state: State shared with the other wrappers. Without it, the handler runs on every ``accumulate_size``-th call.

    Raises:
        TypeError: If ``grad_handler`` is not a handler, or is already wrapped.
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
        """Reduce the accumulated gradient if a step is due. Collective in that case."""
        state = self.accumulation
        if self.alone:
            if state.counted_call():
                self.grad_handler.handle_gradient()
        elif state.is_due and self.number not in state.handled:
            state.finalize()
            self.grad_handler.handle_gradient()
            state.handled.add(self.number)

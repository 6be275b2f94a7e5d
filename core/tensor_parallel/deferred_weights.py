"""Deferred weight gradients: backward queues the matmuls, and a pipeline schedule runs them later.

Zero-bubble schedules (arXiv:2401.10241) fill pipeline bubbles with these matmuls. All other gradients (biases, norms,
layers of other libraries) are computed during backward, so any module is correct under such a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

WeightWork = list[Callable[[], None]]

_queue: WeightWork | None = None  # queue for the running backward; a process runs one at a time


def current_queue() -> WeightWork | None:
    """Return the weight-gradient queue, or ``None`` if backward computes weight gradients immediately."""
    return _queue


@contextmanager
def deferred_weight_gradients() -> Iterator[WeightWork]:
    """Queue the weight gradients of backward passes inside the block, and yield the list of deferred matmuls.

    Call each entry once, in order. With sequence parallelism an entry all-gathers its input, so all ranks of a
    tensor-parallel group must call their entries in the same order.
    """
    global _queue
    before, _queue = _queue, []
    try:
        yield _queue
    finally:
        _queue = before

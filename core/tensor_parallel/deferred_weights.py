"""Weight gradients put off: backward queues the products of linear layers, and a pipeline schedule runs them later.

Zero-bubble schedules (arXiv:2401.10241) fill waiting time with them. Everything else of a backward pass, biases and
norms and what no layer of ours computes, is done in the pass itself, so any module is right under such a schedule and
one built from our layers gains from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

WeightWork = list[Callable[[], None]]

_queue: WeightWork | None = None  # of the backward that is running; a process runs one at a time


def current_queue() -> WeightWork | None:
    """Queue for weight gradients of a linear layer's backward; None if they are computed at once."""
    return _queue


@contextmanager
def deferred_weight_gradients() -> Iterator[WeightWork]:
    """Backward passes inside leave weight gradients in the list that this yields; call each entry once, in order.

    With sequence parallelism an entry gathers its input: all ranks of a tensor-parallel group call theirs alike.
    """
    global _queue
    before, _queue = _queue, []
    try:
        yield _queue
    finally:
        _queue = before

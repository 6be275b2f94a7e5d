"""Generation with a split model: all ranks of a group gather the logits, and draw the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from core.hugging_face.run.loss.parallel_loss import ParallelCausalLoss, output_layer


def generate_together(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a split model's ``generate`` with gathered logits and the same random numbers on all ranks of the group."""
    model: Any = getattr(method, "__self__")  # noqa: B009
    with _gathering_logits(model), model.forward_stream.alike():
        return method(*args, **kwargs)


@contextmanager
def _gathering_logits(model: Any) -> Iterator[None]:
    """Let the output layer gather logits that are split over tensor parallelism, inside the context."""
    head: Any = output_layer(model)[1] if isinstance(model.loss_function, ParallelCausalLoss) else None
    forward = getattr(head, "forward", None)
    seamed: Any = getattr(forward, "inner", forward)  # unwraps a DeferringHead
    seam = getattr(seamed, "seam", None)
    if seam is None:
        yield
        return
    seamed.seam = replace(seam, after="gather")
    try:
        yield
    finally:
        seamed.seam = seam

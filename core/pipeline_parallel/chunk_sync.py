"""Gradient reduction of one model chunk, started after its last backward of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from core.distributed import DistributedDataParallel


def func_of_chunk(funcs: Any, name: str, chunk: int, chunks: int) -> Callable[..., Any] | None:
    """Return a ModelParallelConfig callback for one chunk.

    ``funcs`` is one function, a list with one function per chunk (as in Megatron), or ``None``. A list of another
    length raises ValueError.
    """
    if funcs is None:
        return None
    if not isinstance(funcs, Sequence):
        funcs = [funcs]
    if len(funcs) != chunks:
        raise ValueError(
            f"config.{name} holds {len(funcs)} functions, and this rank has {chunks} chunks; give {chunks}"
        )
    func: Callable[..., Any] = funcs[chunk]
    return func


class ChunkSync:
    """State of a chunk during a step: accumulating until its last weight gradient is due, then reducing, then complete.

    Args:
        no_sync: Context that prevents the chunk from reducing. Defaults to the wrapper's.
        grad_sync: Called with the parameters when all gradients are complete, instead of launching from hooks.
        from_hooks: True if the last backward produces every gradient, so that hooks may launch buckets during it. False
            if weight gradients are computed separately or another chunk contributes to a shared parameter. ``complete``
            then announces all gradients at once.
    """

    def __init__(
        self,
        chunk: nn.Module,
        *,
        no_sync: Callable[[], AbstractContextManager[Any]] | None,
        grad_sync: Callable[..., Any] | None,
        from_hooks: bool,
    ) -> None:
        self.chunk = chunk
        own: Callable[[], AbstractContextManager[Any]] = getattr(chunk, "no_sync", nullcontext)
        self.no_sync = own if no_sync is None else no_sync
        self.grad_sync = grad_sync
        self.from_hooks = from_hooks and grad_sync is None
        self.context: AbstractContextManager[Any] | None = None

    def begin(self) -> None:
        self.leave()
        self.context = self.no_sync()
        self.context.__enter__()

    def last_backward(self) -> None:
        """Leave no_sync before the last backward, if hooks may launch buckets during it."""
        if self.from_hooks:
            self.leave()

    def complete(self) -> None:
        """Finish the chunk, because every gradient of this step has been accumulated.

        Calls ``grad_sync``, or announces all gradients to the wrapper if its hooks have not launched the buckets.
        """
        self.leave()
        if self.grad_sync is not None:
            self.grad_sync(self.chunk.parameters())
        elif not self.from_hooks and isinstance(self.chunk, DistributedDataParallel):
            reducer = self.chunk.reducer
            for bucket in reducer.buckets:
                for index in range(len(bucket.params)):
                    reducer.arrive(bucket, index)

    def leave(self) -> None:
        """Leave the no_sync context if it is active. Also called after a failed step."""
        context, self.context = self.context, None
        if context is not None:
            context.__exit__(None, None, None)

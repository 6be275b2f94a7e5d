"""ChunkSync: marks a wrapped model chunk's last backward of a step, after which its buckets may be reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from core.distributed import DistributedDataParallel


def func_of_chunk(funcs: Any, name: str, chunk: int, chunks: int) -> Callable[..., Any] | None:
    """A callback of ModelParallelConfig for one chunk: Megatron's users give one, or a list of one a chunk."""
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
    """One chunk's step: ACCUMULATING until its last weight gradient is due, then SYNCING, then complete.

    no_sync: the context that keeps a chunk from reducing; by default the wrapper's. grad_sync: called with the
    parameters once all gradients are there, instead of launching from hooks. from_hooks: does the last backward produce
    every gradient, so that hooks may launch buckets during it? Where weight gradients are computed apart, or another
    chunk adds to a shared parameter, they may not, and `complete` announces all gradients at once.
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
        """A step begins: accumulate."""
        self.leave()
        self.context = self.no_sync()
        self.context.__enter__()

    def last_backward(self) -> None:
        """The last backward comes next."""
        if self.from_hooks:
            self.leave()

    def complete(self) -> None:
        """Every gradient of this step has been accumulated."""
        self.leave()
        if self.grad_sync is not None:
            self.grad_sync(self.chunk.parameters())
        elif not self.from_hooks and isinstance(self.chunk, DistributedDataParallel):
            reducer = self.chunk.reducer
            for bucket in reducer.buckets:
                for index in range(len(bucket.params)):
                    reducer.arrive(bucket, index)

    def leave(self) -> None:
        """Stop keeping the chunk from reducing; also after a step that failed."""
        context, self.context = self.context, None
        if context is not None:
            context.__exit__(None, None, None)

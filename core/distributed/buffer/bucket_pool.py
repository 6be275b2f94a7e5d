"""BucketPool: memory for full gradients if a rank keeps only its shard (strategy 'optim_grads', ZeRO-2)."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import torch

POOL_BUCKETS = 2  # one that fills and one that is being reduced


def pool_numel(sizes: Sequence[int]) -> int:
    """Return the number of elements needed for the largest two buckets that are adjacent in launch order."""
    return max((one + next_one for one, next_one in itertools.pairwise(sizes)), default=sum(sizes))


class BucketPool:
    """Memory for POOL_BUCKETS full buckets of one buffer, one at its beginning and one at its end.

    Taking memory from both ends means that one very large bucket, such as an embedding's, needs no room for a second
    one of its size. The memory is kept between steps, because fresh pages cost more than a reduction. The end is used
    only while the beginning is taken, so its pages are never allocated if one bucket at a time is enough.

    Note [Backward waits for memory]
    Buckets acquire memory in launch order, which is the same on all ranks. A bucket that finds no room waits for the
    oldest reduction in flight, in backward too. This cannot deadlock: the rank that has launched the fewest buckets
    waits for one of its buckets, which all other ranks have launched as well, so it continues. A rank that has no
    gradients for a bucket launches it at the end of its backward or in finalize_model_grads.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # [pool_numel of the buffer's buckets]
        self.held: list[torch.Tensor | None] = [None] * POOL_BUCKETS  # at the beginning, and at the end
        # (function that waits for a reduction, its memory), oldest first: handles are waited for in launch order
        self.in_flight: deque[tuple[Callable[[], object], torch.Tensor]] = deque()

    def has_room(self, numel: int) -> bool:
        """Return True if ``acquire`` would not wait."""
        taken = [memory.numel() for memory in self.held if memory is not None]
        return len(taken) < POOL_BUCKETS and sum(taken) + numel <= self.memory.numel()

    def acquire(self, numel: int) -> torch.Tensor:
        """Return uninitialized memory, [numel]. Waits for the oldest reductions in flight until there is room."""
        while not self.has_room(numel) and self.in_flight:
            self.in_flight[0][0]()
        if not self.has_room(numel):  # at the end of a step more buckets may need full gradients
            return self.memory.new_empty(numel)
        end = 0 if self.held[0] is None else 1
        memory = self.held[end] = self.memory[self.memory.numel() - numel :] if end else self.memory[:numel]
        return memory

    def release(self, memory: torch.Tensor) -> bool:
        """Return the memory of a bucket that is no longer in flight. True if it belongs to the pool."""
        is_held = any(held is memory for held in self.held)
        self.held = [None if held is memory else held for held in self.held]
        self.in_flight = deque(begun for begun in self.in_flight if begun[1] is not memory)
        return is_held

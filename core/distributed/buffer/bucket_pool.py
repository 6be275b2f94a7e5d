"""BucketPool: memory for whole gradients where a rank keeps only its shard (strategy 'optim_grads', ZeRO-2)."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import torch

POOL_BUCKETS = 2  # one that fills and one that travels


def pool_numel(sizes: Sequence[int]) -> int:
    """Elements for the two buckets that are longest together, of those that follow each other in launch order."""
    return max((one + next_one for one, next_one in itertools.pairwise(sizes)), default=sum(sizes))


class BucketPool:
    """Memory for POOL_BUCKETS whole buckets of one buffer, one at its beginning and one at its end.

    A bucket that is longer than all others, such as an embedding's, so needs no room for another one of its length.
    The memory is kept between steps, because fresh pages cost more than a reduction. The end is used only while the
    beginning is taken, so its pages never exist if one bucket at a time is enough.

    Note [Backward waits for memory]
    Buckets acquire memory in launch order, which is the same on all ranks. A bucket that finds no room waits for the
    oldest reduction in flight, in backward too. No rank waits for ever: the rank that has launched the fewest buckets
    waits for one of its own, which all other ranks have launched as well, so it continues. A rank that has no
    gradients for a bucket launches it at the end of its backward or in finalize_model_grads.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # [pool_numel of the buffer's buckets]
        self.held: list[torch.Tensor | None] = [None] * POOL_BUCKETS  # at the beginning, and at the end
        # What waits for a reduction, and its memory; oldest first: handles are waited for in launch order
        self.in_flight: deque[tuple[Callable[[], object], torch.Tensor]] = deque()

    def has_room(self, numel: int) -> bool:
        """True if `acquire` would not wait."""
        taken = [memory.numel() for memory in self.held if memory is not None]
        return len(taken) < POOL_BUCKETS and sum(taken) + numel <= self.memory.numel()

    def acquire(self, numel: int) -> torch.Tensor:
        """[numel], undefined. Waits for the oldest reductions in flight while there is no room."""
        while not self.has_room(numel) and self.in_flight:
            self.in_flight[0][0]()
        if not self.has_room(numel):  # at the end of a step whole gradients may be asked for of more buckets
            return self.memory.new_empty(numel)
        end = 0 if self.held[0] is None else 1
        memory = self.held[end] = self.memory[self.memory.numel() - numel :] if end else self.memory[:numel]
        return memory

    def release(self, memory: torch.Tensor) -> bool:
        """Take back what `acquire` returned; its bucket is not in flight any more. True if it is the pool's memory."""
        is_held = any(held is memory for held in self.held)
        self.held = [None if held is memory else held for held in self.held]
        self.in_flight = deque(begun for begun in self.in_flight if begun[1] is not memory)
        return is_held

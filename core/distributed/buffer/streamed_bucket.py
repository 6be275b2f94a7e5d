"""StreamedBucket: a bucket of which only this rank's shard is kept (strategy 'optim_grads', ZeRO-2, arXiv:1910.02054).

Its gradients are whole only while they fill and travel, in memory borrowed from a small pool. Every reduction adds to
the shard, so a step may have several: one a microbatch, or one at the end.

Backward waits for memory: a bucket that finds none takes that of the oldest one in flight, once all ranks have launched
that one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum

import torch
from torch import nn

from core.agree import SyncError
from core.distributed.buffer.bucket import Bucket, BucketGroups, BucketState
from core.distributed.buffer.grad_attribute import dense
from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.layout.param_layout import BucketLayout
from core.distributed.wire.collectives import Collectives, Handle

POOL_BUCKETS = 2  # one that fills and one that travels, each at an End of the pool
GAP_ELEMENTS = 4096  # elements that are zeroed in the time that a call for one gap takes
MOVED_TOGETHER = 2**20  # bytes of gradients that may wait for each other before they move into a bucket's memory


class End(Enum):
    """Of a pool's memory."""

    FRONT = "front"
    BACK = "back"


def pool_numel(sizes: Sequence[int]) -> int:
    """Elements for the two buckets that are longest together, of those that follow each other in launch order."""
    return max((one + next_one for one, next_one in itertools.pairwise(sizes)), default=sum(sizes))


class BucketPool:
    """Memory for POOL_BUCKETS whole buckets of one buffer, in launch order one at its beginning and one at its end.

    A bucket that is longer than all others, as an embedding's, so needs no room for another one of its length. Kept
    between steps, as fresh pages cost more than a reduction; pages that were never needed are never there.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # [pool_numel of the buffer's buckets]
        self.free = deque(reversed(End))
        self.held: dict[End, torch.Tensor] = {}
        self.in_flight: deque[StreamedBucket] = deque()  # oldest first: handles are waited for in launch order

    @property
    def nbytes(self) -> int:
        """Bytes of its memory, in use or not."""
        return self.memory.numel() * self.memory.element_size()

    def has_room(self, numel: int) -> bool:
        """Can that many elements be had without waiting for the wire?"""
        held = sum(memory.numel() for memory in self.held.values())
        return bool(self.free) and held + numel <= self.memory.numel()

    def acquire(self, numel: int) -> torch.Tensor:
        """[numel], undefined. Waits for the oldest buckets in flight when the pool is used up, in backward too.

        That ends: a rank that launched a later bucket had to wait for the same ones, and has done its part of them.
        """
        while not self.has_room(numel) and self.in_flight:
            self.in_flight[0].absorb()
        if not self.has_room(numel):  # further memory is for whole gradients at the end of a step that were asked for
            return self.memory.new_empty(numel)
        # The end used last, so that another's pages are never there if one is enough.
        end = self.free.pop()
        memory = self.held[end] = (
            self.memory[:numel] if end is End.FRONT else self.memory[self.memory.numel() - numel :]
        )
        return memory

    def owns(self, memory: torch.Tensor) -> bool:
        """Is this the pool's, and not something further?"""
        return memory.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()

    def release(self, memory: torch.Tensor) -> None:
        """Give back what `acquire` gave."""
        for end, held in list(self.held.items()):
            if held is memory:
                del self.held[end]
                self.free.append(end)


class StreamedBucket(Bucket):
    """`grad` and `views` exist from the first gradient that moves in until the reduction has been added to the shard.

    Within a step: ACCUMULATING --launch--> IN_FLIGHT, and next_round brings it back to ACCUMULATING.
    """

    def __init__(
        self,
        layout: BucketLayout,
        shard: torch.Tensor,
        pool: BucketPool,
        params: list[nn.Parameter],
        contracts: list[GradientContract],
        groups: BucketGroups,
        *,
        scale: float,
        average: bool,
        scale_later: bool,
        param_data: torch.Tensor,
    ) -> None:
        self.shard = shard  # [numel / shards], kept
        self.pool = pool
        self.memory: torch.Tensor | None = None  # the pool's
        self.known_views: dict[int, list[torch.Tensor]] = {}  # by the address of the pool's memory
        super().__init__(
            layout,
            shard[:0],
            params,
            contracts,
            groups,
            sharded=True,
            scale=scale,
            average=average,
            scale_later=scale_later,
            param_data=param_data,
        )
        self.nbytes = self.event.nbytes = layout.numel * shard.element_size()
        self.filled = [False] * len(params)  # has its view a gradient?
        self.empty = True  # has nothing been added to the shard in this step?
        self.may_fill = False  # is it this bucket's turn to hold memory while its gradients come?
        self.gaps = self._gaps()
        self.sizes = [(slot.end - slot.start) * shard.element_size() for slot in layout.slots]
        self.waiting: list[int] = []  # parameters whose gradients are to move
        self.waiting_bytes = 0

    def _views(self) -> list[torch.Tensor]:
        if self.memory is None:
            return []
        place = self.memory.data_ptr()
        if place not in self.known_views:
            views = super()._views()
            if not self.pool.owns(self.memory):
                return views
            self.known_views[place] = views
        return self.known_views[place]

    def _gaps(self) -> list[tuple[int, int]]:
        gaps, end = [], 0
        for slot in self.layout.slots:
            gaps.append((end, slot.start - self.layout.start))
            end = slot.end - self.layout.start
        gaps.append((end, self.layout.numel))
        return [(low, high) for low, high in gaps if low < high]

    # -- memory -----------------------------------------------------------------------------------------------------

    @property
    def homes(self) -> list[torch.Tensor]:
        return [self.shard] * len(self.params)

    @property
    def owned_grad(self) -> torch.Tensor:
        return self.shard

    @property
    def valid_grad(self) -> torch.Tensor:
        return self.grad if self.full else self.shard

    def _borrow(self) -> None:
        if self.memory is not None:
            return
        self.memory = self.grad = self.pool.acquire(self.layout.numel)
        self.views = self._views()
        # What other buckets left between the gradients would be added again and again.
        if len(self.gaps) * GAP_ELEMENTS > self.layout.numel:
            self.grad.zero_()
        else:
            for low, high in self.gaps:
                self.grad[low:high].zero_()

    def _give_back(self) -> None:
        if self.memory is not None:
            self.pool.release(self.memory)
        self.memory = None
        self.grad = self.shard[:0]
        self.views = []
        self.filled = [False] * len(self.params)

    def attach(self) -> None:
        """`.grad` is None: autograd makes a fresh one, which moves into the pool's memory when it is complete."""
        if self.full or self.state is not BucketState.ACCUMULATING:
            super().attach()
            return
        for param in self.params:
            param.grad = None

    def reset(self, *, keep: bool = False) -> None:
        super().reset(keep=keep)
        if self in self.pool.in_flight:
            self.pool.in_flight.remove(self)
        self._give_back()
        self.waiting = []
        self.waiting_bytes = 0
        self.empty = True
        self.may_fill = False

    # -- a round ----------------------------------------------------------------------------------------------------

    def arrive(self, index: int) -> bool:
        complete = super().arrive(index)
        if self.may_fill and self.state is BucketState.ACCUMULATING and self._has_room():
            self._borrow()
            self.waiting.append(index)
            self.waiting_bytes += self.sizes[index]
            if complete or self.waiting_bytes >= MOVED_TOGETHER:
                self._move_waiting()
        return complete

    def _has_room(self) -> bool:
        return self.memory is not None or self.pool.has_room(self.layout.numel)

    def _move_waiting(self) -> None:
        self._move(self.waiting)
        self.waiting = []
        self.waiting_bytes = 0

    @torch.no_grad()
    def collect(self, *, detach: bool = True) -> None:
        self.detached = True  # always: a gradient is moved out of `.grad`
        self.note_dropped()
        self._borrow()
        self._move(range(len(self.params)))
        self.waiting = []
        self.waiting_bytes = 0

    @torch.no_grad()
    def _move(self, indices: Iterable[int]) -> None:
        """Add gradients to their views, or zero the views of those that never came."""
        fresh: list[int] = []
        for index in indices:
            grad = self._take(index) if self.params[index].requires_grad else None
            if grad is None:
                if not self.filled[index]:
                    self.params[index].grad = None
                    self.views[index].zero_()
                    if self.empty:  # else it may have had one in an earlier microbatch
                        self.used[index] = self.carries[index]
            elif grad.is_sparse or self.filled[index]:
                whole = dense(grad)
                self.views[index].add_(whole) if self.filled[index] else self.views[index].copy_(whole)
                self._place(index)
            else:
                fresh.append(index)
            if grad is not None:
                self.used[index] = 1
        if fresh:
            grads = [self.params[index].grad for index in fresh]
            torch._foreach_copy_([self.views[index] for index in fresh], grads)
            for index in fresh:
                self._place(index)

    def _place(self, index: int) -> None:
        if self.placed[index] and self.params[index].grad is not self.placeholders[index]:
            self.dropped = self.dropped or self.contracts[index].name
        super()._place(index)
        if self.placeholders[index].touched:
            self.placeholders[index].reset()  # what was added to it is in the view
        self.filled[index] = True

    def launch(self, collectives: Collectives, *, detach: bool = True) -> None:
        super().launch(collectives)
        self.pool.in_flight.append(self)

    def note_done(self) -> bool:
        """Do this rank's part of the reduction as soon as the others' gradients are there: they may wait for it."""
        self.handle.poll()
        return super().note_done()

    @torch.no_grad()
    def absorb(self) -> None:
        """Wait for the reduce-scatter, add its result to the shard, and give the memory back."""
        if self.memory is None or self.state is not BucketState.IN_FLIGHT:
            return
        self.note_done()
        self.clock.mark(self.event, "wait_start_s")
        self.wait()
        self.handle = Handle()
        self.pool.in_flight.remove(self)
        low, high = self.shard_range
        if self.empty:
            self.shard.copy_(self.grad[low:high])
        else:
            self.shard.add_(self.grad[low:high])
        self.empty = False
        self.clock.end(self.event)
        self._give_back()

    def next_round(self) -> None:
        """Accumulate again, on top of what the shard holds."""
        self.absorb()
        self._empty_grads()
        self.may_fill = False
        self.past_events.append(self.event)
        self.event = self._new_event()
        self.state = BucketState.ACCUMULATING
        self.arrivals = [0] * len(self.params)
        self.pending = sum(count > 0 for count in self.expected)

    def _empty_grads(self) -> None:
        """Leave in `.grad` only what is not reduced yet."""
        self.note_dropped()
        for index, param in enumerate(self.params):
            param.grad = self._take(index)
        self._forget_touches()
        self.placed = bytearray(len(self.params))

    def reduced_so_far(self) -> torch.Tensor | None:
        """A copy of what the rounds of this step have added up to; None before the first one is done. Waits."""
        self.absorb()
        if self.carried is not None:
            raise SyncError(
                "this step adds to gradients of an earlier finalize_model_grads, which are not saved; save before the "
                "first finalize_model_grads of a step, or after optimizer.step()"
            )
        self._empty_grads()
        return None if self.empty else self.shard.clone()

    def restore(self, reduced: torch.Tensor) -> None:
        """Go on from what `reduced_so_far` gave, in a step that has just begun."""
        self._expect(BucketState.ACCUMULATING, "restored")
        self.shard.copy_(reduced)
        self.empty = False
        for index in range(len(self.params)):  # which parameters have had a gradient is seen in it
            self.used[index] |= bool(self.valid_part(index).any())

    # -- the end of a step ------------------------------------------------------------------------------------------

    def join_instances(self, collectives: Collectives) -> None:
        self._expect(BucketState.IN_FLIGHT, "joined")
        self.absorb()
        if self.groups.replica is not None:
            self._launch_across_instances(self.shard, collectives)

    def close(self) -> None:
        super().close()
        if self.full:  # the sync rules have worked on the whole gradient
            low, high = self.shard_range
            self.shard.copy_(self.grad[low:high])

    def gather_whole(self, collectives: Collectives) -> None:
        self._borrow()
        low, high = self.shard_range
        self.grad[low:high].copy_(self.shard)
        super().gather_whole(collectives)

    @torch.no_grad()
    def follow_edits(self) -> str | None:
        problem = super().follow_edits()
        if self.full:
            low, high = self.shard_range
            self.shard.copy_(self.grad[low:high])
        return problem

    def _multiply(self, factor: float | torch.Tensor) -> None:
        if self.state is BucketState.IN_FLIGHT and self.memory is not None:
            raise SyncError(
                f"{self.event.name} is in flight and cannot be scaled; scale after finish_grad_sync or "
                "finalize_model_grads"
            )
        self.shard.mul_(factor)
        self.grad.mul_(factor)
        for index in range(len(self.params)):
            grad = self._take(index)
            if grad is not None and self.state is BucketState.ACCUMULATING:
                grad.mul_(factor)

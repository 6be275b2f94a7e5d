"""BucketMemory: where a bucket's gradients lie, and which part of them is valid on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.buffer.bucket_pool import BucketPool
from core.distributed.layout.param_layout import BucketLayout, Slot


@dataclass(frozen=True, slots=True)
class BucketGroups:
    """The process groups of a bucket: shard x replica = data."""

    data: dist.ProcessGroup  # all ranks whose gradients are added
    shard: dist.ProcessGroup  # the ranks that share one copy of the optimizer's state
    replica: dist.ProcessGroup | None  # the same shard in the other optimizer instances

    @property
    def all(self) -> list[dist.ProcessGroup]:
        """The groups that exist."""
        return [self.data, self.shard, *([self.replica] if self.replica else [])]


class BucketMemory:
    """Gradients of a slice [start, end) of a buffer.

    memory: [layout.numel], or with a pool this rank's shard alone. With a pool `grad` and `views` are empty but for the
    time between `borrow` and `give_back`.
    """

    def __init__(
        self,
        layout: BucketLayout,
        memory: torch.Tensor,
        groups: BucketGroups,
        *,
        sharded: bool,
        pool: BucketPool | None,
    ) -> None:
        self.layout = layout
        self.ranges = [(slot.start - layout.start, slot.end - layout.start) for slot in layout.slots]
        self.dtype, self.device = memory.dtype, memory.device if pool is None else pool.memory.device
        self.groups = groups
        self.sharded = sharded
        self.pool = pool
        self.gathered = False  # True if the whole bucket is valid though it was reduced to shards
        # [start, end) within the bucket that this rank's optimizer updates; everything where it is not sharded.
        self.shard_range = 0, layout.numel
        if sharded:
            self.shard_range = layout.shard_of(dist.get_rank(groups.shard))
        # The same memory in every step; it may lie on the host, not on `device`.
        self.owned_grad = self.shard_of(memory) if pool is None else memory
        self.grad, self.views = memory[:0], list[torch.Tensor]()  # whole gradients, and each parameter's in its shape
        self._views_at: dict[int, list[torch.Tensor]] = {}  # by address: a bucket gets the same two places again
        if pool is None:
            self._lie_in(memory)

    def _lie_in(self, memory: torch.Tensor) -> None:
        place = memory.data_ptr()
        if place not in self._views_at:
            self._views_at[place] = views_of(memory, self.layout.slots, self.layout.start)
        self.grad, self.views = memory, self._views_at[place]

    def borrow(self) -> None:
        """Have memory for whole gradients; what lies between the parameters is zero. Waits for the pool."""
        if self.pool is None or self.views:
            return
        self._lie_in(self.pool.acquire(self.layout.numel))
        end = 0
        for low, high in (*self.ranges, (self.layout.numel, 0)):  # what other buckets left there would be added up
            if end < low:
                self.grad[end:low].zero_()
            end = high

    def give_back(self) -> None:
        """Return borrowed memory."""
        if self.pool is not None:
            if not self.pool.release(self.grad):
                self._views_at.pop(self.grad.data_ptr(), None)
            self.grad, self.views = self.owned_grad[:0], []

    @property
    def storage(self) -> list[torch.Tensor]:
        """For each parameter the memory that must stay where it is as long as the model is wrapped."""
        return self.views if self.pool is None else [self.owned_grad] * len(self.ranges)

    @property
    def whole(self) -> bool:
        """True if the whole bucket is valid after the reduction, and not this rank's shard alone."""
        return self.gathered or not self.sharded

    @property
    def valid_range(self) -> tuple[int, int]:
        """[start, end) within the bucket that holds reduced gradients once the bucket is reduced."""
        return (0, self.layout.numel) if self.whole else self.shard_range

    @property
    def valid_grad(self) -> torch.Tensor:
        """The gradients in the valid range, flat."""
        return self.grad if self.whole else self.owned_grad

    def valid_part(self, index: int) -> torch.Tensor:
        """The flat part of parameter `index`'s gradient that lies in the valid range; may be empty."""
        return self.part_of(self.valid_grad, index, self.valid_range)

    def part_of(self, flat: torch.Tensor, index: int, within: tuple[int, int]) -> torch.Tensor:
        """Elements of parameter `index` in a tensor that holds the elements `within` = [start, end) of the bucket."""
        low, high = within
        start, end = max(self.ranges[index][0], low), min(self.ranges[index][1], high)
        return flat[start - low : max(start, end) - low]

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor that is laid out like the bucket."""
        low, high = self.shard_range
        return whole[low:high]

    def copy_to_shard(self) -> None:
        """Copy changes of the whole gradient to the shard, if that is separate memory."""
        if self.pool is not None and self.gathered:
            self.owned_grad.copy_(self.shard_of(self.grad))


def views_of(flat: torch.Tensor, slots: Sequence[Slot], start: int) -> list[torch.Tensor]:
    """For each slot its elements of `flat` in the parameter's shape; `flat` begins at element `start` of the buffer."""
    return [flat[slot.start - start : slot.end - start].view(slot.shape) for slot in slots]


@torch.no_grad()
def move_to(views: Sequence[torch.Tensor], params: Sequence[nn.Parameter]) -> None:
    """Move each parameter, with its values, to the memory of a view. The memory that it had before is freed."""
    for param, view in zip(params, views, strict=True):
        view.copy_(param)
        param.data = view

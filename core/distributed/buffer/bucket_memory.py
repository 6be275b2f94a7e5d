"""BucketMemory: the memory of one bucket's gradients and parameters."""

from __future__ import annotations

import torch

from core.distributed.buffer.bucket_pool import BucketPool
from core.distributed.buffer.memory_tier import MemoryTier, copy_to_host
from core.distributed.layout.param_layout import BucketLayout


class BucketMemory:
    """Gradients and parameters of a bucket, full and this rank's shard of them.

    With a pool, a rank keeps only its shard of gradients: ``memory`` is [shard] instead of [layout.numel], and ``grad``
    and ``views`` are empty except between ``borrow`` and ``give_back``. ``param_data`` are full parameters,
    [layout.numel], if only the optimizer is sharded; ``param_shard`` is [shard], if a rank keeps no more of them.
    """

    def __init__(
        self,
        layout: BucketLayout,
        shard_range: tuple[int, int],
        memory: torch.Tensor,
        pool: BucketPool | None,
        param_data: torch.Tensor | None,
        param_shard: torch.Tensor | None,
    ) -> None:
        self.layout, self.shard_range, self.pool = layout, shard_range, pool
        self.device = memory.device if pool is None else pool.memory.device
        # The same memory in every step; it may be on the host instead of `device`.
        self.owned_grad = self.shard_of(memory) if pool is None else memory
        # Full gradients, and one view for each parameter.
        self.grad, self.views = (memory, layout.views_of(memory)) if pool is None else (memory[:0], [])
        self._views_at: dict[int, list[torch.Tensor]] = {}  # keyed by address: the pool lends one of two places
        self.param_data = param_data
        self.param_shard = param_shard if param_data is None else self.shard_of(param_data)
        self.params_stay = False  # True if another tensor shares their memory: an optimizer must not move them
        self.state_tier: MemoryTier | None = None  # memory of masters and moments, if they are offloaded
        self._copied: torch.Event | None = None  # recorded after the last copy of the shard to the host

    def borrow(self, *, wait: bool = True) -> bool:
        """Get memory for full gradients from the pool; False if that would have to wait and must not.

        Gaps between parameters are zeroed.
        """
        if self.pool is None or self.views:
            return True
        if not wait and not self.pool.has_room(self.layout.numel):
            return False
        self.grad = self.pool.acquire(self.layout.numel)
        address = self.grad.data_ptr()
        if address not in self._views_at:
            self._views_at[address] = self.layout.views_of(self.grad)
        self.views = self._views_at[address]
        end = 0
        for low, high in (*self.layout.ranges, (self.layout.numel, 0)):  # values of other buckets would be summed
            if end < low:
                self.grad[end:low].zero_()
            end = high
        return True

    def give_back(self) -> None:
        if self.pool is not None:
            if not self.pool.release(self.grad):
                self._views_at.pop(self.grad.data_ptr(), None)
            self.grad, self.views = self.owned_grad[:0], []

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor with the bucket's layout."""
        low, high = self.shard_range
        return full[low:high]

    def keep(self, shard: torch.Tensor, *, adds: bool = False) -> None:
        """Store ``shard``, on the device, as this rank's shard of gradients, or add it to the stored one."""
        if self.owned_grad.device == self.device:
            self.owned_grad.add_(shard) if adds else self.owned_grad.copy_(shard)
            return
        if adds:  # on the device, so that the host waits for nothing
            shard = self.owned_grad.to(self.device, non_blocking=True).add_(shard)
        self._copied = copy_to_host(self.owned_grad, shard)

    def await_copy(self) -> None:
        """Wait until the host's copy of the shard is complete, before the shard is read or written."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    @property
    def permanent(self) -> list[torch.Tensor]:
        """For each parameter the memory that must not move while the model is wrapped."""
        return self.views if self.pool is None else [self.owned_grad] * len(self.layout.slots)

"""GradBuffer: the memory. One contiguous tensor a (parameter dtype, gradient dtype, data group); gradients are views
of it, or its parts are what is left of them after their reduction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from core.distributed.buffer.bucket import Bucket, BucketGroups
from core.distributed.buffer.bucket_memory import move_to, views_of
from core.distributed.buffer.bucket_pool import BucketPool, pool_numel
from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.distributed_data_parallel_config import Residency
from core.distributed.layout.param_layout import BufferLayout
from core.distributed.wire import huge_pages
from core.distributed.wire.shared_memory import HostChannel, allocate


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a layout's dtype name, such as 'float32'."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype


class GradBuffer:
    """Storage that follows a BufferLayout.

    grad_data: [numel], or where a rank keeps only its shards of gradients, [numel / shards], without offloaded ones.
    offloaded: memory of those, by index of the bucket. param_data: [numel] where the optimizer is sharded and
    parameters are not, else None. param_shards: those of each bucket where they are.
    """

    def __init__(
        self,
        layout: BufferLayout,
        params: Mapping[str, nn.Parameter],
        contracts: Mapping[str, GradientContract],
        groups: BucketGroups,
        residency: Residency,
        param_shards: Sequence[torch.Tensor],
        offloaded: Mapping[int, torch.Tensor],
        *,
        scale: float,
        average: bool,
        scale_later: bool,
        share_memory: bool,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.groups = groups
        self.sharded = residency.sharded
        self.shares_memory = share_memory
        grad_dtype = dtype_named(layout.key.grad_dtype)
        kept_by = residency.spread(layout.shards).grads
        self.channels: list[HostChannel] = []
        numels = [0 if plan.index in offloaded else plan.numel // kept_by for plan in layout.buckets]
        starts = list(itertools.accumulate(numels, initial=0))
        self.grad_data = self._allocate(starts[-1], grad_dtype, device)
        self.offloaded = list(offloaded.values())
        self.param_data: torch.Tensor | None = None
        if residency.sharded and residency.keeps_params:
            self.param_data = self._allocate(layout.numel, dtype_named(layout.key.param_dtype), device)
        self.pool: BucketPool | None = None
        if not residency.keeps_whole:
            numel = pool_numel([plan.numel for plan in layout.buckets])
            self.pool = BucketPool(self._allocate(numel, grad_dtype, device, torch.empty))
        self.buckets: list[Bucket] = []
        for number, (plan, param_shard) in enumerate(itertools.zip_longest(layout.buckets, param_shards)):
            members = [params[slot.name] for slot in plan.slots]
            # `.data` gives the slice a version counter of its own, apart from the buffer's other buckets.
            param_data = None if self.param_data is None else self.param_data.data[plan.start : plan.end]
            if param_data is not None:
                move_to(views_of(param_data, plan.slots, plan.start), members)
            memory = offloaded.get(plan.index, self.grad_data.data[starts[number] : starts[number + 1]])
            bucket = Bucket(
                plan,
                memory,
                members,
                [contracts[slot.name] for slot in plan.slots],
                groups,
                sharded=residency.sharded,
                pool=self.pool,
                scale=scale,
                average=average,
                scale_later=scale_later,
                param_data=param_data,
                param_shard=param_shard,
            )
            self.buckets.append(bucket)
            for param, view in itertools.zip_longest(members, bucket.views):
                param.main_grad = view  # None where no memory of the whole gradient lasts
            bucket.attach()  # the same as `.grad`

    def _allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        make: Callable[..., torch.Tensor] = huge_pages.zeros,
    ) -> torch.Tensor:
        tensor, channels = allocate(numel, dtype, device, self.groups.all if self.shares_memory else (), make)
        self.channels += channels
        return tensor

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.layout.numel

    @property
    def numel_unpadded(self) -> int:
        """Elements without the padding at the ends of buckets."""
        return sum(bucket.layout.numel_unpadded for bucket in self.buckets)

    def zero(self) -> None:
        """Zero all gradients, and attach them to `.grad` again."""
        for bucket in self.buckets:
            if bucket.copied is not None:
                bucket.await_copy()
        for memory in (self.grad_data, *self.offloaded):
            memory.zero_()
        for bucket in self.buckets:
            bucket.attach()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient. Raises SyncError while a bucket is in flight."""
        for bucket in self.buckets:
            bucket.scale_gradients(factor)

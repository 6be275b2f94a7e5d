"""GradBuffer: contiguous gradient memory, one tensor for each (parameter dtype, gradient dtype, data group).

Gradients are views of this tensor. If gradients are sharded, it contains the shards that remain after the reduction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.bucket_memory import BucketMemory
from core.distributed.buffer.bucket_pool import BucketPool, pool_numel
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.layout.model_plan import BucketGroups, ModelPlan
from core.distributed.layout.param_layout import BufferLayout
from core.distributed.wire import huge_pages
from core.distributed.wire.shared_memory import HostChannel, HostMemory


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype of a layout's dtype name, such as 'float32'."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@torch.no_grad()
def move_to(views: Sequence[torch.Tensor], params: Sequence[nn.Parameter]) -> None:
    """Move each parameter and its values into the memory of a view of its shape and dtype; free its old memory."""
    for param, view in zip(params, views, strict=True):
        view.copy_(param)
        param.data = view


class GradBuffer:
    """Gradient memory with a BufferLayout, and its buckets.

    ``grad_data`` is [numel]. If a rank keeps only its shards of gradients, it is [numel / shards], without the
    ``offloaded`` ones, which are given by bucket index. ``param_data`` is [numel] if the optimizer is sharded and
    parameters are not, else None; ``param_shards`` has their shards if they are. Sums are divided by ``divisor``.
    """

    def __init__(
        self,
        layout: BufferLayout,
        plan: ModelPlan,
        ddp_config: DistributedDataParallelConfig,
        groups: BucketGroups,
        divisor: int,
        param_shards: Sequence[torch.Tensor],
        offloaded: Mapping[int, torch.Tensor],
    ) -> None:
        self.layout = layout
        residency = ddp_config.residency
        self.channels: list[HostChannel] = []

        def memory(
            numel: int, dtype: torch.dtype, make: Callable[..., torch.Tensor] = huge_pages.zeros
        ) -> torch.Tensor:
            shared = HostMemory.share(numel, dtype, plan.device, groups.all) if ddp_config.share_host_memory else None
            if shared is None:
                return make(numel, dtype=dtype, device=plan.device)
            self.channels += shared.channels
            return shared.tensor

        grad_dtype = dtype_named(layout.key.grad_dtype)
        kept_by = 1 if residency.keeps_whole else layout.shards
        numels = [0 if bucket.index in offloaded else bucket.numel // kept_by for bucket in layout.buckets]
        starts = list(itertools.accumulate(numels, initial=0))
        self.grad_data = memory(starts[-1], grad_dtype)
        self.offloaded = list(offloaded.values())
        self.param_data: torch.Tensor | None = None
        if residency.sharded and residency.keeps_params:
            self.param_data = memory(layout.numel, dtype_named(layout.key.param_dtype))
        self.pool: BucketPool | None = None
        if not residency.keeps_whole:
            self.pool = BucketPool(memory(pool_numel([b.numel for b in layout.buckets]), grad_dtype, torch.empty))
        # A bucket is multiplied by `averaged / divisor` before its reduction, and comes out divided by the divisor.
        averaged = dist.get_world_size(groups.data) if ddp_config.average_in_collective else 1
        self.buckets: list[Bucket] = []
        for number, (placed, param_shard) in enumerate(itertools.zip_longest(layout.buckets, param_shards)):
            # `.data` gives the slice its own version counter, separate from the buffer's other buckets.
            of_bucket = BucketMemory(
                placed,
                placed.shard_of(dist.get_rank(groups.shard)),
                offloaded.get(placed.index, self.grad_data.data[starts[number] : starts[number + 1]]),
                self.pool,
                None if self.param_data is None else self.param_data.data[placed.start : placed.end],
                param_shard,
            )
            bucket = Bucket(placed, of_bucket, plan, ddp_config, groups, averaged / divisor)
            self.buckets.append(bucket)
            if of_bucket.param_data is not None:
                move_to(placed.views_of(of_bucket.param_data), bucket.params)
            for param, view in itertools.zip_longest(bucket.params, of_bucket.views):
                param.main_grad = view  # None if the full gradient has no permanent memory
            bucket.attach()  # the same as `.grad`

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return self.layout.numel

    def zero(self) -> None:
        """Zero all gradients and attach them to ``.grad`` again."""
        for bucket in self.buckets:
            bucket.memory.await_copy()
        for memory in (self.grad_data, *self.offloaded):
            memory.zero_()
        for bucket in self.buckets:
            bucket.attach()

"""GradBuffer: the memory. One contiguous tensor a (parameter dtype, gradient dtype, data group); gradients are views
of it, or its parts are what is left of them after their reduction.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from core.distributed.bucket import Bucket, BucketGroups
from core.distributed.gradient_contract import GradientContract
from core.distributed.param_layout import BufferLayout
from core.distributed.streamed_bucket import BucketPool, StreamedBucket


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a layout's dtype name, such as 'float32'."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype


class GradBuffer:
    """Storage that follows a BufferLayout.

    grad_data: [numel], or where gradients are sharded too (`streamed`) this rank's shards alone, [numel / shards].
    param_data: [numel] where the optimizer is sharded, else None.
    """

    def __init__(
        self,
        layout: BufferLayout,
        params: Mapping[str, nn.Parameter],
        contracts: Mapping[str, GradientContract],
        groups: BucketGroups,
        *,
        sharded: bool,
        scale: float,
        average: bool,
        scale_later: bool,
        streamed: bool,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.groups = groups
        self.sharded = sharded
        grad_dtype = dtype_named(layout.key.grad_dtype)
        kept_by = layout.shards if streamed else 1  # each element of a gradient is kept by one rank in so many
        self.grad_data = torch.zeros(layout.numel // kept_by, dtype=grad_dtype, device=device)
        self.param_data = (
            torch.zeros(layout.numel, dtype=dtype_named(layout.key.param_dtype), device=device) if sharded else None
        )
        self.pool: BucketPool | None = None
        if streamed:
            largest = max((plan.numel for plan in layout.buckets), default=0)
            self.pool = BucketPool(largest, grad_dtype, device)
        self.buckets: list[Bucket] = []
        for plan in layout.buckets:
            members = [params[slot.name] for slot in plan.slots]
            # `.data` gives the slice a version counter of its own, apart from the buffer's other buckets.
            param_data = None if self.param_data is None else self.param_data.data[plan.start : plan.end]
            common: Any = {
                "params": members,
                "contracts": [contracts[slot.name] for slot in plan.slots],
                "groups": groups,
                "scale": scale,
                "average": average,
                "scale_later": scale_later,
            }
            memory = self.grad_data.data[plan.start // kept_by : plan.end // kept_by]
            bucket: Bucket
            if self.pool is not None:
                bucket = StreamedBucket(plan, memory, self.pool, param_data=param_data, **common)
            else:
                bucket = Bucket(plan, memory, sharded=sharded, param_data=param_data, **common)
            self.buckets.append(bucket)
            for slot, param in zip(plan.slots, members, strict=True):
                param.grad = None
                param.grad_dtype = grad_dtype  # autograd accumulates in this dtype
                if param_data is not None:
                    home = param_data[slot.start - plan.start : slot.end - plan.start].view(slot.shape)
                    home.copy_(param.data)
                    param.data = home
            for param, view in itertools.zip_longest(members, bucket.views):
                param.main_grad = view  # None where gradients are streamed: there is no lasting one
            bucket.attach()

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
        self.grad_data.zero_()
        for bucket in self.buckets:
            bucket.attach()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient. Raises SyncError while a bucket is in flight."""
        for bucket in self.buckets:
            bucket.scale_gradients(factor)

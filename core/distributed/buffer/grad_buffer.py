"""GradBuffer: the memory. One contiguous tensor a (parameter dtype, gradient dtype, data group); gradients are views
of it, or its parts are what is left of them after their reduction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from core import huge_pages
from core.agree import SyncError
from core.distributed.buffer.bucket import Bucket, BucketGroups
from core.distributed.buffer.param_views import homes_of, move_to
from core.distributed.buffer.streamed_bucket import BucketPool, StreamedBucket, pool_numel
from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.layout.param_layout import BufferLayout
from core.distributed.wire.host_channel import HostChannel
from core.distributed.wire.host_memory import HostMemory


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
        share_memory: bool,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.groups = groups
        self.sharded = sharded
        self.shares_memory = share_memory
        grad_dtype = dtype_named(layout.key.grad_dtype)
        kept_by = layout.shards if streamed else 1  # each element of a gradient is kept by one rank in so many
        self.channels: list[HostChannel] = []
        self.grad_data = self._allocate(layout.numel // kept_by, grad_dtype, device)
        self.param_data: torch.Tensor | None = None
        if sharded:
            self.param_data = self._allocate(layout.numel, dtype_named(layout.key.param_dtype), device)
        self.pool: BucketPool | None = None
        if streamed:
            numel = pool_numel([plan.numel for plan in layout.buckets])
            self.pool = BucketPool(self._allocate(numel, grad_dtype, device, torch.empty))
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
            if param_data is not None:
                move_to(homes_of(param_data, plan.slots, plan.start), members)
            for param, view in itertools.zip_longest(members, bucket.views):
                if param.grad_dtype is not grad_dtype:  # autograd accumulates in this dtype
                    param.grad = None
                    param.grad_dtype = grad_dtype
                param.main_grad = view  # None where gradients are streamed: there is no lasting one
            bucket.attach()  # the same as `.grad`

    def _allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        make: Callable[..., torch.Tensor] = huge_pages.zeros,
    ) -> torch.Tensor:
        """[numel] by `make`; where the data group's ranks are processes of one host, they map it from each other."""
        groups = self.groups.all
        shared = HostMemory.share(numel, dtype, device, groups) if self.shares_memory else None
        if shared is None:
            return make(numel, dtype=dtype, device=device)
        self.channels += shared.channels
        return shared.tensor

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.layout.numel

    @property
    def numel_unpadded(self) -> int:
        """Elements without the padding at the ends of buckets."""
        return sum(bucket.layout.numel_unpadded for bucket in self.buckets)

    def check_memory(self) -> None:
        """Raise SyncError if somebody has freed the memory; whoever then writes a gradient ends the process."""
        for what, data in (("gradients", self.grad_data), ("parameters", self.param_data)):
            if data is not None and data.untyped_storage().nbytes() < data.nbytes:
                raise SyncError(
                    f"the memory of the {what} of {self.buckets[0].contracts[0].name!r} and others was freed since the "
                    "wrap (resize_ of their storage). Keep it while the model is wrapped; deleting the wrapper frees it"
                )

    def zero(self) -> None:
        """Zero all gradients, and attach them to `.grad` again."""
        self.check_memory()
        self.grad_data.zero_()
        for bucket in self.buckets:
            bucket.attach()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient. Raises SyncError while a bucket is in flight."""
        for bucket in self.buckets:
            bucket.scale_gradients(factor)

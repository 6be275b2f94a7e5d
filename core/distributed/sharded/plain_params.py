"""PlainParams: parameters that stay unsharded between steps. A sharded optimizer gathers the other ranks' updates.

All gathers end within the step. Parameters are plain tensors that any code may read or write at any time, and no hook
detects all such accesses: see "Why parameters are not gathered under the forward" in docs/source/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.autograd.graph import increment_version

from core.distributed.buffer.bucket import Bucket
from core.distributed.sharded.eviction import Budget, Window
from core.distributed.sharded.param_unit import ParamUnit
from core.distributed.wire.collective_events import CollectiveEvent
from core.distributed.wire.collectives import Collectives, Flight


class PlainParams:
    """Parameters of one wrapped model chunk, with the same interface as ``Unsharder``, which has sharded parameters."""

    units: Sequence[ParamUnit] = ()
    eviction: Window | Budget = Window()
    stays_unsharded = True  # True while all values stay available until the caller frees them
    pop_gathers: Callable[[], dict[str, list[str]]] = dict  # the gathers since the last call

    def __init__(self, buckets: Sequence[Bucket], collectives: Collectives) -> None:
        self.buckets = list(reversed(buckets))  # the forward's order
        self.collectives = collectives
        self.gathers: dict[Bucket, Flight] = {}  # the last gather of each bucket

    # -- after an optimizer's step ----------------------------------------------------------------------------------

    def finish_update(self) -> None:
        """Gather every bucket's parameters over its shard group, and wait. Collective."""
        for bucket in self.buckets:
            self.start_bucket(bucket)
        self.finish()

    def start_bucket(self, bucket: Bucket) -> None:
        """Gather one bucket's parameters while an optimizer updates the next bucket. Asynchronous.

        Call it for every bucket, in one order on all ranks, instead of ``finish_update``. Then call ``finish`` before
        any parameter is read or written. Collective over the bucket's shard group.
        """
        self._wait_for(bucket)
        if bucket.memory.param_data is not None:
            name = f"parameters of {bucket.name}"
            self.gathers[bucket] = self.collectives.all_gather(bucket.memory.param_data, bucket.groups.shard, name)

    def finish(self) -> None:
        for bucket in self.buckets:
            self._wait_for(bucket)

    def _wait_for(self, bucket: Bucket) -> None:
        gather = self.gathers.get(bucket)
        if gather is not None and not gather.waited:  # also after an interrupted wait, which a save resumes
            gather.wait()
            increment_version(bucket.params)

    def events(self) -> list[CollectiveEvent]:
        """Return each bucket's last gather if it was waited for, in launch order."""
        gathers = (self.gathers.get(bucket) for bucket in self.buckets)
        return [gather.event for gather in gathers if gather is not None and gather.waited]

    # -- what sharded parameters need -------------------------------------------------------------------------------

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gathered(self, caller: str = "gathered()") -> AbstractContextManager[None]:
        return nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def own_part_of(self, param: nn.Parameter) -> tuple[int, torch.Tensor] | None:
        return None

    def shard_param(self, param: nn.Parameter) -> None:
        """Keep only the shard of a parameter with separate memory. Call ``shard_params`` after the last one."""

    def shard_params(self, params: Iterable[nn.Parameter]) -> None:
        """Keep only the shards of parameters with separate memory."""

    def refuse(self, error: Exception | None, what: str) -> None:
        if error is not None:
            raise error

    def begin_update(self) -> None:
        """Prepare for a write of parameters."""

    def invalidate(self) -> None:
        """Record that parameters have new values."""

    def barrier(self) -> None:
        """Wait for ranks that read this rank's memory."""

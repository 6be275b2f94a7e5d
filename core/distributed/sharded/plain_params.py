"""PlainParams: parameters that are whole between steps. A sharded optimizer gathers what other ranks have updated.

A gather never outlives the step. Parameters are plain tensors that anybody may read or write at any time, and no hook
sees all of that: see "Why parameters are not gathered under the forward" in docs/source/architecture.md.
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
    """Parameters of one wrapped model chunk, and the face of `Unsharder`, which has those that are sharded."""

    units: Sequence[ParamUnit] = ()
    eviction: Window | Budget = Window()
    is_held = True  # True while all values are there until the caller gives them up
    take_gathers: Callable[[], dict[str, list[str]]] = dict  # the gathers since the last call

    def __init__(self, buckets: Sequence[Bucket], collectives: Collectives) -> None:
        self.buckets = list(reversed(buckets))  # the forward's order
        self.collectives = collectives
        self.gathers: dict[Bucket, Flight] = {}  # the last one of each bucket

    # -- after an optimizer's step ----------------------------------------------------------------------------------

    def finish_update(self) -> None:
        """Gather every bucket's parameters over its shard group, and wait. Collective."""
        for bucket in self.buckets:
            self.start_bucket(bucket)
        self.finish()

    def start_bucket(self, bucket: Bucket) -> None:
        """Gather one bucket's parameters, for an optimizer that is about to update the next one; returns at once.

        Called for every bucket, in one order on all ranks, instead of `finish_update`; then `finish`, before anybody
        reads or writes a parameter. Collective over the bucket's shard group.
        """
        self._wait_for(bucket)
        if bucket.param_data is not None:
            name = f"parameters of {bucket.name}"
            self.gathers[bucket] = self.collectives.all_gather(bucket.param_data, bucket.groups.shard, name)

    def finish(self) -> None:
        """Complete every gather in flight."""
        for bucket in self.buckets:
            self._wait_for(bucket)

    def _wait_for(self, bucket: Bucket) -> None:
        gather = self.gathers.get(bucket)
        if gather is not None and not gather.waited:  # also after an interrupted wait, which a save resumes
            gather.wait()
            increment_version(bucket.params)

    def events(self) -> list[CollectiveEvent]:
        """Of each bucket the last gather, if it was waited for, in the order of their launch."""
        gathers = (self.gathers.get(bucket) for bucket in self.buckets)
        return [gather.event for gather in gathers if gather is not None and gather.waited]

    # -- what sharded parameters need -------------------------------------------------------------------------------

    def reading(self) -> AbstractContextManager[None]:
        """Surround what reads parameters."""
        return nullcontext()

    def gathered(self, caller: str = "gathered()") -> AbstractContextManager[None]:
        """Surround what needs all parameters, or writes them."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        """Surround what copies whole values into parameters."""
        return nullcontext()

    def own_part_of(self, param: nn.Parameter) -> tuple[int, torch.Tensor] | None:
        """(First element that this rank keeps, the elements from there on); None for a parameter that it has whole."""
        return None

    def cut(self, param: nn.Parameter) -> None:
        """Keep the shard of a parameter that has memory of its own; `cut_all` after the last."""

    def cut_all(self, params: Iterable[nn.Parameter]) -> None:
        """Keep the shards of parameters that have memory of their own."""

    def refuse(self, error: Exception | None, what: str) -> None:
        """Raise an error of this rank."""
        if error is not None:
            raise error

    def begin_update(self) -> None:
        """Parameters are about to be written."""

    def invalidate(self) -> None:
        """They have other values now."""

    def barrier(self) -> None:
        """Wait for ranks that read this one's memory."""

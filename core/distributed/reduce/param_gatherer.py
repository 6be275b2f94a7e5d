"""ParamGatherer: gathers the shards of updated parameters within the optimizer's step.

A gather never outlives the step. Parameters are plain tensors that anybody may read or write at any time, and no hook
sees all of that: see "Why parameters are not gathered under the forward" in docs/source/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.autograd.graph import increment_version

from core.distributed.buffer.bucket import Bucket
from core.distributed.wire.collective_events import CollectiveEvent
from core.distributed.wire.collectives import Collectives, Flight


class ParamGatherer:
    """The parameter gathers of one wrapped model chunk with sharded buckets."""

    def __init__(self, buckets: Sequence[Bucket], collectives: Collectives) -> None:
        self.buckets = list(reversed(buckets))  # the forward's order
        self.collectives = collectives
        self.pending: dict[int, tuple[Bucket, Flight]] = {}  # by id(bucket): the gathers in flight
        self.finished: dict[int, CollectiveEvent] = {}  # by id(bucket): the gather that was last waited for

    def gather(self) -> None:
        """Gather every bucket's parameters over its shard group, and wait. Collective."""
        for bucket in self.buckets:
            self.start_bucket(bucket)
        self.finish()

    def start_bucket(self, bucket: Bucket) -> None:
        """Gather one bucket's parameters and return at once. Collective, in one order of buckets on all ranks."""
        self._wait_for(id(bucket))
        if bucket.param_data is not None:
            name = f"parameters of {bucket.name}"
            self.pending[id(bucket)] = bucket, self.collectives.all_gather(bucket.param_data, bucket.groups.shard, name)

    def finish(self) -> None:
        """Complete every gather in flight."""
        for bucket_id in list(self.pending):
            self._wait_for(bucket_id)

    def _wait_for(self, bucket_id: int) -> None:
        entry = self.pending.get(bucket_id)
        if entry is not None:
            bucket, flight = entry
            flight.wait()
            self.pending.pop(bucket_id, None)  # not before: a save of the weights resumes an interrupted wait
            self.finished[bucket_id] = flight.event
            increment_version(bucket.params)

    def events(self) -> list[CollectiveEvent]:
        """Of each bucket the gather that was last waited for, in the order of their launch."""
        return [self.finished[id(bucket)] for bucket in self.buckets if id(bucket) in self.finished]

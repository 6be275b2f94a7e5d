"""ParamLayout: which parameter lies where in which buffer and bucket. Pure arithmetic: no torch, no processes, no
storage.

The rules are those a user of Megatron Core knows. Parameters are laid out in reverse registration order, which is
roughly the order in which backward produces their gradients, so that bucket 0 can leave first. Where gradients are
sharded, each parameter starts at a multiple of 64 elements and each bucket ends at a multiple of lcm(shards, 128), so
that every rank's shard of a bucket has the same size; where they are not, nothing is padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PARAM_START_ALIGNMENT = 64  # elements: 128 bytes in bf16
BUCKET_END_ALIGNMENT = 128  # elements: every shard starts on a 16-byte boundary in any dtype
HIGH_BUSBW_ALIGNMENT = 2**16  # elements: NCCL's rings reach full bus bandwidth only on such multiples


def pad_to_multiple(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class BufferKey:
    """Parameters with equal keys share a buffer: one dtype of parameter, one of gradient, one data-parallel group."""

    param_dtype: str
    grad_dtype: str
    data_group: str  # 'dp_cp' for dense parameters, 'expt_dp' for experts


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the layout has to know of one parameter."""

    name: str
    shape: tuple[int, ...]
    key: BufferKey
    own_bucket: bool = False  # its copies on other pipeline stages must be cut into the same shards

    @property
    def numel(self) -> int:
        """Elements of the parameter; 1 for a 0-dim one, 0 for an empty one."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place: elements [start, end) of its buffer."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int
    bucket: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Elements [start, end) of a buffer that one collective carries; `numel_unpadded` leaves out the padding at the
    end.
    """

    index: int
    start: int
    end: int
    numel_unpadded: int
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        """Elements that travel, padding included."""
        return self.end - self.start

    def shard(self, rank: int, shards: int) -> tuple[int, int]:
        """[start, end) within the bucket of the part that `rank` of `shards` owns."""
        if self.numel % shards:
            raise ValueError(f"bucket {self.index} of {self.numel} elements does not split into {shards} equal shards")
        size = self.numel // shards
        return rank * size, (rank + 1) * size

    def describe(self) -> str:
        """The bucket with the names of its first and last parameter, for messages."""
        if not self.slots:
            return f"bucket {self.index} (empty)"
        return f"bucket {self.index} ({self.slots[0].name} .. {self.slots[-1].name})"


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One contiguous buffer: its buckets, in launch order."""

    key: BufferKey
    numel: int
    shards: int
    buckets: tuple[BucketLayout, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All places, in buffer order."""
        return tuple(slot for bucket in self.buckets for slot in bucket.slots)


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """Every buffer of a wrapped model, dense ones first."""

    buffers: tuple[BufferLayout, ...]


def resolve_bucket_size(
    bucket_size: int | None, num_buckets: int | None, *, numel: int, data_ranks: int, overlap: bool, one_bucket: bool
) -> int | None:
    """Elements a bucket holds before it closes; None for one bucket however large.

    Without overlap, or where gradients are not on the critical path (`one_bucket`), splitting only costs latency.
    """
    if bucket_size is not None and num_buckets is not None:
        raise ValueError(f"bucket_size ({bucket_size}) and num_buckets ({num_buckets}) exclude each other; give one")
    if not overlap or one_bucket:
        return None
    if num_buckets is not None:
        return max(1, -(-numel // num_buckets))
    if bucket_size is not None:
        return bucket_size
    return max(40_000_000, 1_000_000 * data_ranks)


def bucket_end_alignment(shards: int, *, high_busbw: bool) -> int:
    """What a sharded bucket's length is a multiple of."""
    alignments = (shards, BUCKET_END_ALIGNMENT, HIGH_BUSBW_ALIGNMENT) if high_busbw else (shards, BUCKET_END_ALIGNMENT)
    return math.lcm(*alignments)


def plan_buffer(
    specs: Sequence[ParamSpec], *, bucket_size: int | None, shards: int, sharded: bool, high_busbw: bool = False
) -> BufferLayout:
    """Lay out one buffer. `specs` are in registration order and share one key; `shards` is the size of the shard
    group.
    """
    buckets: list[BucketLayout] = []
    slots: list[Slot] = []
    bucket_start = cursor = 0
    end_alignment = bucket_end_alignment(shards, high_busbw=high_busbw) if sharded else 1

    def close_bucket() -> None:
        nonlocal slots, bucket_start, cursor
        if not slots:
            return
        numel_unpadded = cursor - bucket_start
        end = bucket_start + pad_to_multiple(numel_unpadded, end_alignment)
        buckets.append(BucketLayout(len(buckets), bucket_start, end, numel_unpadded, tuple(slots)))
        slots, bucket_start, cursor = [], end, end

    for spec in reversed(specs):
        alone = spec.own_bucket and sharded
        if alone:
            close_bucket()
        if sharded:
            cursor = pad_to_multiple(cursor, PARAM_START_ALIGNMENT)
        slots.append(Slot(spec.name, spec.shape, cursor, cursor + spec.numel, len(buckets)))
        cursor += spec.numel
        if alone or (bucket_size is not None and cursor - bucket_start >= bucket_size):
            close_bucket()
    close_bucket()
    return BufferLayout(specs[0].key, buckets[-1].end if buckets else 0, shards, tuple(buckets))


def group_by_key(specs: Sequence[ParamSpec]) -> dict[BufferKey, list[ParamSpec]]:
    """The specs of each buffer, dense buffers first, else in the order of first registration."""
    by_key: dict[BufferKey, list[ParamSpec]] = {}
    for spec in specs:
        by_key.setdefault(spec.key, []).append(spec)
    return dict(sorted(by_key.items(), key=lambda item: item[0].data_group != "dp_cp"))


def launch_order(layout: ParamLayout, registration: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(buffer, bucket) pairs in the one order in which every rank of a stage launches them.

    A bucket's turn comes with its earliest registered parameter, whose gradient backward is expected to produce last.
    One order over all buffers keeps several communicators from being entered in different orders on different ranks.
    """
    position = {name: index for index, name in enumerate(registration)}
    turns = [
        (-min(position[slot.name] for slot in bucket.slots), b, bucket.index)
        for b, buffer in enumerate(layout.buffers)
        for bucket in buffer.buckets
    ]
    per_buffer_next: dict[int, int] = {}
    order = []
    for _, b, _index in sorted(turns):
        # Within a buffer the order is the bucket index; turns only interleave the buffers.
        index = per_buffer_next.get(b, 0)
        per_buffer_next[b] = index + 1
        order.append((b, index))
    return tuple(order)

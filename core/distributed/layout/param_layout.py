"""ParamLayout: positions of parameters in buffers and buckets. Pure arithmetic: no processes or memory.

The rules are Megatron Core's. Parameters are in reverse registration order, roughly the order in which backward
produces their gradients, so that bucket 0 can be launched first. In sharded buffers each parameter starts at a multiple
of 64 elements. Each bucket ends at a multiple of lcm(shards, 128), so that all shards of a bucket have the same size.
Other buffers have no padding.

A parameter can be kept in one rank's shard, for an optimizer that needs unsplit matrices. Such parameters have separate
buckets, in which they are spread over the shards by size.

If gradients are sharded, full ones use memory for two buckets, so the largest bucket determines the cost. A bucket is
then closed before it would exceed its size, not after. Only a single large parameter makes a larger one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

PARAM_START_ALIGNMENT = 64  # elements: 128 bytes in bf16
BUCKET_END_ALIGNMENT = 128  # elements: every shard starts on a 16-byte boundary in any dtype
MOST_PADDING = 1.25  # a bucket of unsplit parameters stays open for more while its shards would be more uneven
SHARDED_PARTS = 16  # buckets in a buffer of sharded gradients: two in memory are an eighth of the gradients
SHARDED_LEAST = 1_000_000  # elements; smaller buckets cost more time than they save memory
HIGH_BUSBW_ALIGNMENT = 2**16  # elements: NCCL's rings reach full bus bandwidth only on such multiples


def pad_to_multiple(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


class BufferKey(NamedTuple):
    """Key of a buffer: parameters with equal dtype, gradient dtype and data-parallel group share one buffer."""

    param_dtype: str
    grad_dtype: str
    data_group: str  # 'dp_cp' for dense parameters, 'expt_dp' for experts


class ParamSpec(NamedTuple):
    """Properties of one parameter that the layout depends on."""

    name: str
    shape: tuple[int, ...]
    key: BufferKey
    own_bucket: bool = False  # its copies on other pipeline stages must be cut into the same shards
    whole: bool = False  # in sharded buffers it is kept in one shard

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim parameter, 0 for an empty one."""
        return math.prod(self.shape)


class Slot(NamedTuple):
    """Position of one parameter: elements [start, end) of its buffer."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int


Placed = list[tuple[ParamSpec, int]]  # parameters of one bucket, each with its offset in the bucket


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Elements [start, end) of a buffer that one collective reduces, padding at the end included.

    ``shards`` is the number of equal parts, one for each rank of the shard group; 1 if the buffer is not sharded.
    """

    index: int
    start: int
    end: int
    slots: tuple[Slot, ...]
    shards: int

    @property
    def numel(self) -> int:
        """Number of elements sent, padding included."""
        return self.end - self.start

    def shard_of(self, rank: int) -> tuple[int, int]:
        """Return the range [start, end) within the bucket that a rank updates. The only function that decides this."""
        size = self.numel // self.shards
        place = rank % self.shards
        return place * size, (place + 1) * size

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Range [start, end) within the bucket of each parameter."""
        return [(slot.start - self.start, slot.end - self.start) for slot in self.slots]

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of each parameter's elements, in its shape, of a tensor [numel] with the bucket's layout."""
        return [flat[start:end].view(slot.shape) for slot, (start, end) in zip(self.slots, self.ranges, strict=True)]

    def describe(self) -> str:
        """Return the bucket's index with its first and last parameter, for messages."""
        if not self.slots:
            return f"bucket {self.index} (empty)"
        return f"bucket {self.index} ({self.slots[0].name} .. {self.slots[-1].name})"


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One contiguous buffer and its buckets in launch order.

    ``shards`` is the number of ranks in the shard group, even if the buffer is not sharded.
    """

    key: BufferKey
    numel: int
    shards: int
    buckets: tuple[BucketLayout, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Positions of all parameters, in buffer order."""
        return tuple(slot for bucket in self.buckets for slot in bucket.slots)


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """All buffers of a wrapped model, dense ones first."""

    buffers: tuple[BufferLayout, ...]


def resolve_bucket_size(
    bucket_size: int | None,
    num_buckets: int | None,
    *,
    numel: int,
    data_ranks: int,
    overlap: bool,
    one_bucket: bool,
    shards_gradients: bool = False,
) -> int | None:
    """Return the number of elements after which a bucket is closed, or None for one bucket of any size.

    Without overlap, or if gradients are not on the critical path (``one_bucket``), splitting only adds latency. If
    gradients are sharded, full ones take as much memory as two buckets, so buckets are always split.
    """
    if not shards_gradients and (not overlap or one_bucket):
        return None
    if num_buckets is not None:
        return max(1, -(-numel // num_buckets))
    if bucket_size is not None:
        return bucket_size
    usual = max(40_000_000, 1_000_000 * data_ranks)
    return min(usual, max(SHARDED_LEAST, -(-numel // SHARDED_PARTS))) if shards_gradients else usual


def plan_buffer(
    specs: Sequence[ParamSpec],
    *,
    bucket_size: int | None,
    shards: int,
    sharded: bool,
    high_busbw: bool = False,
    strict_size: bool = False,
) -> BufferLayout:
    """Lay out one buffer of parameters with equal keys, in registration order.

    A bucket is closed after ``bucket_size`` elements (None: never), or with ``strict_size`` before only a single
    parameter may exceed it. ``sharded`` aligns parameters and buckets for equal shards, and ``high_busbw`` pads bucket
    ends to multiples of 2**16 elements.
    """
    parts = shards if sharded else 1
    limit = math.inf if bucket_size is None else bucket_size
    start_alignment = PARAM_START_ALIGNMENT if sharded else 1
    end_alignment = math.lcm(shards, BUCKET_END_ALIGNMENT, HIGH_BUSBW_ALIGNMENT if high_busbw else 1) if sharded else 1
    buckets: list[BucketLayout] = []

    def close(placed: Placed, numel: int) -> None:
        begin = buckets[-1].end if buckets else 0
        places = [(spec, begin + offset) for spec, offset in placed]
        slots = tuple(Slot(spec.name, spec.shape, start, start + spec.numel) for spec, start in places)
        buckets.append(BucketLayout(len(buckets), begin, begin + pad_to_multiple(numel, end_alignment), slots, parts))

    row: Placed = []
    filled = 0  # number of elements in `row`
    whole: list[ParamSpec] = []
    total = largest = 0  # number of elements in `whole`
    for spec in reversed(specs):
        numel = spec.numel
        if sharded and spec.whole:
            whole.append(spec)
            total, largest = total + numel, max(largest, numel)
            if total >= limit and shards * largest <= MOST_PADDING * total:
                close(*spread_over_shards(whole, shards, end_alignment))
                whole, total, largest = [], 0, 0
            continue
        alone = sharded and spec.own_bucket
        offset = pad_to_multiple(filled, start_alignment)
        if row and (alone or (strict_size and numel and offset + numel > limit)):
            close(row, filled)
            row, offset = [], 0
        row.append((spec, offset))
        filled = offset + numel
        if alone or filled >= limit:
            close(row, filled)
            row, filled = [], 0
    if whole:
        close(*spread_over_shards(whole, shards, end_alignment))
    if row:
        close(row, filled)
    return BufferLayout(specs[0].key, buckets[-1].end, shards, tuple(buckets))


def spread_over_shards(specs: Sequence[ParamSpec], shards: int, end_alignment: int) -> tuple[Placed, int]:
    """Place every parameter inside one of the equal shards: the largest first, each into the emptiest shard.

    Returns each parameter with its offset, in order of offset, and the number of elements in all shards, which is a
    multiple of ``end_alignment``.
    """
    loads = [(0, shard) for shard in range(shards)]
    chosen: list[tuple[int, int, ParamSpec]] = []  # (shard, offset in it, parameter)
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        load, shard = heapq.heappop(loads)
        chosen.append((shard, load, spec))
        heapq.heappush(loads, (pad_to_multiple(load + spec.numel, PARAM_START_ALIGNMENT), shard))
    unit = math.lcm(BUCKET_END_ALIGNMENT * shards, end_alignment) // shards
    size = pad_to_multiple(max(load for load, _ in loads), unit)
    placed = [(spec, shard * size + offset) for shard, offset, spec in chosen]
    return sorted(placed, key=lambda item: (item[1], item[0].numel)), size * shards


def group_by_key(specs: Sequence[ParamSpec]) -> dict[BufferKey, list[ParamSpec]]:
    """Group specs, in registration order, by buffer: dense buffers first, then in order of first registration."""
    by_key: dict[BufferKey, list[ParamSpec]] = {}
    for spec in specs:
        by_key.setdefault(spec.key, []).append(spec)
    return dict(sorted(by_key.items(), key=lambda item: item[0].data_group != "dp_cp"))


def launch_order(layout: ParamLayout, registration: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return the one order, as (buffer, bucket) pairs, in which every rank of a stage launches buckets.

    With one order over all buffers, ranks cannot enter several communicators in different orders. A bucket's turn
    depends on its earliest registered parameter, whose gradient backward is expected to produce last. Within a buffer
    the order is the bucket index; turns only interleave the buffers.
    """
    position = {name: place for place, name in enumerate(registration)}
    turns = sorted(
        (-min(position[slot.name] for slot in bucket.slots), number)
        for number, buffer in enumerate(layout.buffers)
        for bucket in buffer.buckets
    )
    following = [iter(range(len(buffer.buckets))) for buffer in layout.buffers]
    return tuple((number, next(following[number])) for _, number in turns)

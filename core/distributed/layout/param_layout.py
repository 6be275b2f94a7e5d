"""ParamLayout: which parameter lies where in which buffer and bucket. Pure arithmetic: no torch, no processes, no
storage.

The rules are those a user of Megatron Core knows. Parameters are laid out in reverse registration order, which is
roughly the order in which backward produces their gradients, so that bucket 0 can leave first. Where gradients are
sharded, each parameter starts at a multiple of 64 elements and each bucket ends at a multiple of lcm(shards, 128), so
that every rank's shard of a bucket has the same size; where they are not, nothing is padded.

A parameter may ask to lie whole in one rank's shard, for an optimizer that needs matrices. Such parameters have buckets
of their own, in which they are spread over the shards by size.

Where whole gradients only pass through memory of two buckets (`streamed`), the largest bucket is what they cost. There
a bucket closes before it would exceed its size, not after; only one large parameter makes a larger one.

What there is one of for each parameter, or is looked up for each, is a NamedTuple: a frozen dataclass takes four times
as long to make and to hash.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

PARAM_START_ALIGNMENT = 64  # elements: 128 bytes in bf16
BUCKET_END_ALIGNMENT = 128  # elements: every shard starts on a 16-byte boundary in any dtype
MOST_PADDING = 1.25  # a bucket of whole parameters waits for more of them while its shards would be more uneven
STREAMED_PARTS = 16  # of a buffer whose gradients are streamed: two in memory at a time are an eighth of them
STREAMED_LEAST = 1_000_000  # elements; smaller buckets cost more time than they save memory
HIGH_BUSBW_ALIGNMENT = 2**16  # elements: NCCL's rings reach full bus bandwidth only on such multiples

T = TypeVar("T", bound=tuple[Any, ...])


def pad_to_multiple(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def tuples_of(kind: type[T], rows: Iterable[tuple[Any, ...]]) -> list[T]:
    """`kind(*row)` of each row, for a NamedTuple; without a line of Python for each."""
    return list(map(partial(tuple.__new__, kind), rows))


class BufferKey(NamedTuple):
    """Parameters with equal keys share a buffer: one dtype of parameter, one of gradient, one data-parallel group."""

    param_dtype: str
    grad_dtype: str
    data_group: str  # 'dp_cp' for dense parameters, 'expt_dp' for experts


class ParamSpec(NamedTuple):
    """What the layout has to know of one parameter."""

    name: str
    shape: tuple[int, ...]
    key: BufferKey
    own_bucket: bool = False  # its copies on other pipeline stages must be cut into the same shards
    whole: bool = False  # where gradients are sharded, it lies in one shard

    @property
    def numel(self) -> int:
        """Elements of the parameter; 1 for a 0-dim one, 0 for an empty one."""
        return math.prod(self.shape)


class Slot(NamedTuple):
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
    bucket_size: int | None,
    num_buckets: int | None,
    *,
    numel: int,
    data_ranks: int,
    overlap: bool,
    one_bucket: bool,
    streamed: bool = False,
) -> int | None:
    """Elements a bucket holds before it closes; None for one bucket however large.

    Without overlap, or where gradients are not on the critical path (`one_bucket`), splitting only costs latency; but
    where they are streamed, whole ones take as much memory as two buckets.
    """
    if bucket_size is not None and num_buckets is not None:
        raise ValueError(f"bucket_size ({bucket_size}) and num_buckets ({num_buckets}) exclude each other; give one")
    if not streamed and (not overlap or one_bucket):
        return None
    if num_buckets is not None:
        return max(1, -(-numel // num_buckets))
    if bucket_size is not None:
        return bucket_size
    usual = max(40_000_000, 1_000_000 * data_ranks)
    return min(usual, max(STREAMED_LEAST, -(-numel // STREAMED_PARTS))) if streamed else usual


def bucket_end_alignment(shards: int, *, high_busbw: bool) -> int:
    """What a sharded bucket's length is a multiple of."""
    alignments = (shards, BUCKET_END_ALIGNMENT, HIGH_BUSBW_ALIGNMENT) if high_busbw else (shards, BUCKET_END_ALIGNMENT)
    return math.lcm(*alignments)


def plan_buffer(
    specs: Sequence[ParamSpec],
    *,
    bucket_size: int | None,
    shards: int,
    sharded: bool,
    high_busbw: bool = False,
    streamed: bool = False,
) -> BufferLayout:
    """Lay out one buffer. `specs` are in registration order and share one key; `shards` is the size of the shard
    group; streamed: only one parameter by itself may exceed `bucket_size`.
    """
    limit = math.inf if bucket_size is None else bucket_size
    end_alignment = bucket_end_alignment(shards, high_busbw=high_busbw) if sharded else 1
    start_alignment = PARAM_START_ALIGNMENT if sharded else 1
    buckets: list[BucketLayout] = []
    row: list[tuple[str, tuple[int, ...], int, int]] = []  # (name, shape, start, end) in the open bucket
    filled = 0  # elements of it
    whole: list[ParamSpec] = []  # of the open bucket of whole parameters
    total = largest = 0  # their elements
    numels = _Numels()

    def close_bucket(placed: list[tuple[str, tuple[int, ...], int, int]], numel: int | None = None) -> None:
        if not placed:
            return
        begin = buckets[-1].end if buckets else 0
        index = len(buckets)
        places = [(name, shape, begin + start, begin + end, index) for name, shape, start, end in placed]
        used = max(map(itemgetter(3), placed))
        end = begin + (pad_to_multiple(used, end_alignment) if numel is None else numel)
        buckets.append(BucketLayout(index, begin, end, used, tuple(tuples_of(Slot, places))))
        placed.clear()

    def close_whole() -> None:
        placed, numel = spread_over_shards(whole, shards, end_alignment)
        close_bucket([(spec.name, spec.shape, start, start + spec.numel) for spec, start in placed], numel)
        whole.clear()

    for spec in reversed(specs):
        name, shape, _, own_bucket, stays_whole = spec
        numel = numels[shape]
        if sharded and stays_whole:
            whole.append(spec)
            total, largest = total + numel, max(largest, numel)
            if total >= limit and shards * largest <= MOST_PADDING * total:
                close_whole()
                total = largest = 0
            continue
        alone = own_bucket and sharded
        if alone:
            close_bucket(row)
        offset = pad_to_multiple(filled, start_alignment) if row else 0
        if streamed and numel and offset + numel > limit:
            close_bucket(row)
            offset = 0
        filled = offset + numel
        row.append((name, shape, offset, filled))
        if alone or filled >= limit:
            close_bucket(row)
    close_whole()
    close_bucket(row)
    return BufferLayout(specs[0].key, buckets[-1].end if buckets else 0, shards, tuple(buckets))


class _Numels(dict[tuple[int, ...], int]):
    """Elements of a shape, worked out once for each: a model has many parameters of few shapes."""

    def __missing__(self, shape: tuple[int, ...]) -> int:
        numel = self[shape] = math.prod(shape)
        return numel


def spread_over_shards(
    specs: Sequence[ParamSpec], shards: int, end_alignment: int
) -> tuple[list[tuple[ParamSpec, int]], int]:
    """Place every parameter inside one of `shards` equal shards: the largest first, each into the emptiest shard.

    Returns ((parameter, offset) in order of offset, elements of all shards together).
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
    if len(layout.buffers) == 1:
        return tuple((0, bucket.index) for bucket in layout.buffers[0].buckets)
    position = dict(zip(registration, itertools.count()))
    turns = [
        (-min(map(position.__getitem__, map(itemgetter(0), bucket.slots))), b, bucket.index)
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

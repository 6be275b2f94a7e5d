"""Layouts against hand-made numbers and against rules stated again."""

import math
import random

import pytest

from core.distributed.layout.param_layout import (
    BufferKey,
    ParamLayout,
    ParamSpec,
    group_by_key,
    launch_order,
    plan_buffer,
    resolve_bucket_size,
)

DENSE = BufferKey("float32", "float32", "dp_cp")
EXPERT = BufferKey("float32", "float32", "expt_dp")


def specs_of(*sizes: int, key: BufferKey = DENSE, alone: tuple[int, ...] = ()) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", (size,), key, own_bucket=i in alone) for i, size in enumerate(sizes)]


def places(layout) -> list[tuple[str, int, int, int]]:
    return [(slot.name, slot.start, slot.end, bucket.index) for bucket in layout.buckets for slot in bucket.slots]


def test_unsharded_parameters_lie_in_reverse_order_without_padding():
    layout = plan_buffer(specs_of(3, 5, 7), bucket_size=None, shards=4, sharded=False)
    assert places(layout) == [("p2", 0, 7, 0), ("p1", 7, 12, 0), ("p0", 12, 15, 0)]
    assert layout.numel == 15 and len(layout.buckets) == 1


def test_a_bucket_closes_once_it_holds_bucket_size_elements():
    layout = plan_buffer(specs_of(3, 5, 7, 2), bucket_size=8, shards=2, sharded=False)
    assert places(layout) == [("p3", 0, 2, 0), ("p2", 2, 9, 0), ("p1", 9, 14, 1), ("p0", 14, 17, 1)]
    assert [(b.start, b.end) for b in layout.buckets] == [(0, 9), (9, 17)]


def test_sharded_parameters_start_at_64_and_buckets_end_at_the_lcm():
    layout = plan_buffer(specs_of(10, 100), bucket_size=None, shards=3, sharded=True)
    assert places(layout) == [("p1", 0, 100, 0), ("p0", 128, 138, 0)]
    bucket = layout.buckets[0]
    assert bucket.numel == 384 and max(slot.end for slot in bucket.slots) == 138  # lcm(3, 128) = 384
    assert [bucket.shard_of(rank) for rank in range(3)] == [(0, 128), (128, 256), (256, 384)]


def test_high_bus_bandwidth_padding_adds_two_to_the_sixteenth():
    for high_busbw, expected in ((True, 3 * 2**16), (False, 384)):
        layout = plan_buffer(specs_of(10), bucket_size=None, shards=6, sharded=True, high_busbw=high_busbw)
        assert layout.buckets[0].numel == expected


def test_a_copy_of_another_stages_parameter_lies_alone_where_sharded():
    layout = plan_buffer(specs_of(10, 20, 30, alone=(1,)), bucket_size=None, shards=2, sharded=True)
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [["p2"], ["p1"], ["p0"]]
    together = plan_buffer(specs_of(10, 20, 30, alone=(1,)), bucket_size=None, shards=2, sharded=False)
    assert len(together.buckets) == 1


def test_empty_and_zero_dim_parameters_have_a_place():
    specs = [ParamSpec("empty", (0, 4), DENSE), ParamSpec("scalar", (), DENSE), ParamSpec("w", (3,), DENSE)]
    layout = plan_buffer(specs, bucket_size=None, shards=2, sharded=False)
    assert places(layout) == [("w", 0, 3, 0), ("scalar", 3, 4, 0), ("empty", 4, 4, 0)]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("sharded", [False, True])
def test_layout_properties_hold_for_random_models(seed: int, sharded: bool):
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 3, 64, 65, 200, 1000]) for _ in range(rng.randint(1, 40))]
    shards = rng.choice([1, 2, 3, 5, 8])
    size = rng.choice([None, 1, 100, 700])
    alone = tuple(i for i in range(len(sizes)) if rng.random() < 0.1)
    layout = plan_buffer(specs_of(*sizes, alone=alone), bucket_size=size, shards=shards, sharded=sharded)
    assert [slot.name for slot in layout.slots] == [f"p{i}" for i in reversed(range(len(sizes)))]
    end = 0
    for slot in layout.slots:
        assert slot.start >= end and slot.end - slot.start == math.prod(slot.shape)
        assert slot.start % 64 == 0 or not sharded
        end = slot.end
    position = 0
    for index, bucket in enumerate(layout.buckets):
        assert bucket.start == position and bucket.index == index and bucket.slots
        assert all(bucket.start <= slot.start and slot.end <= bucket.end for slot in bucket.slots)
        if sharded:
            assert bucket.numel % math.lcm(shards, 128) == 0
            covered = [i for rank in range(shards) for i in range(*bucket.shard_of(rank))]
            assert covered == list(range(bucket.numel))
        if size is not None and not any(int(slot.name[1:]) in alone for slot in bucket.slots):
            without_last = bucket.slots[-2].end - bucket.start if len(bucket.slots) > 1 else 0
            assert without_last < size
        position = bucket.end
    assert position == layout.numel


def test_every_rank_has_all_of_a_bucket_that_is_not_sharded():
    layout = plan_buffer(specs_of(10), bucket_size=None, shards=3, sharded=False)
    assert [layout.buckets[0].shard_of(rank) for rank in range(3)] == [(0, 10)] * 3


def test_bucket_size_defaults():
    def resolve(size, number, *, numel=100, ranks=8, overlap=True, one=False):
        return resolve_bucket_size(size, number, numel=numel, data_ranks=ranks, overlap=overlap, one_bucket=one)

    assert resolve(None, None) == 40_000_000
    assert resolve(None, None, ranks=64) == 64_000_000
    assert resolve(7, None) == 7
    assert resolve(7, None, overlap=False) is None
    assert resolve(7, None, one=True) is None
    assert resolve(None, 3) == 34


def test_gradients_that_are_sharded_have_small_buckets_by_default():
    def resolve(numel, size=None, number=None, ranks=2):
        return resolve_bucket_size(
            size, number, numel=numel, data_ranks=ranks, overlap=False, one_bucket=True, shards_gradients=True
        )

    assert resolve(10_529_280) == 1_000_000
    assert resolve(160_000_001) == 10_000_001
    assert resolve(10**9) == 40_000_000 and resolve(10**10, ranks=64) == 64_000_000
    assert resolve(100, size=7) == 7 and resolve(100, number=3) == 34


def test_a_bucket_of_sharded_gradients_closes_before_it_exceeds_its_size():
    specs = specs_of(300, 0, 100, 250, 64, 64)  # laid out from the last one on, each at a multiple of 64
    layout = plan_buffer(specs, bucket_size=256, shards=2, sharded=True, strict_size=True)
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [
        ["p5", "p4"],  # 128, and 378 with the next one
        ["p3"],
        ["p2", "p1"],  # what has no elements exceeds nothing
        ["p0"],  # one parameter may be larger
    ]
    assert [bucket.numel for bucket in layout.buckets] == [128, 256, 128, 384]


def test_dense_buffers_come_first_and_keys_are_kept_apart():
    half = BufferKey("bfloat16", "float32", "dp_cp")
    specs = [
        ParamSpec("e", (1,), EXPERT),
        ParamSpec("h", (1,), half),
        ParamSpec("d", (1,), DENSE),
        ParamSpec("h2", (1,), half),
    ]
    assert {key: [spec.name for spec in specs] for key, specs in group_by_key(specs).items()} == {
        half: ["h", "h2"],
        DENSE: ["d"],
        EXPERT: ["e"],
    }


def test_launch_order_interleaves_buffers_by_their_earliest_parameter():
    names = ["d0", "e0", "d1", "e1"]
    dense = plan_buffer([ParamSpec(n, (4,), DENSE) for n in ("d0", "d1")], bucket_size=1, shards=1, sharded=False)
    expert = plan_buffer([ParamSpec(n, (4,), EXPERT) for n in ("e0", "e1")], bucket_size=1, shards=1, sharded=False)
    assert launch_order(ParamLayout((dense, expert)), names) == ((1, 0), (0, 0), (1, 1), (0, 1))


def test_launch_order_visits_every_bucket_once_and_buffers_in_index_order():
    rng = random.Random(5)
    names = [f"p{i}" for i in range(60)]
    keys = [rng.choice([DENSE, EXPERT]) for _ in names]
    specs = [ParamSpec(n, (rng.randint(1, 9),), k) for n, k in zip(names, keys, strict=True)]
    buffers = [plan_buffer(s, bucket_size=12, shards=1, sharded=False) for s in group_by_key(specs).values()]
    order = launch_order(ParamLayout(tuple(buffers)), names)
    for number, buffer in enumerate(buffers):
        assert [bucket for b, bucket in order if b == number] == list(range(len(buffer.buckets)))
    assert len(order) == sum(len(buffer.buckets) for buffer in buffers)


@pytest.mark.parametrize("seed", range(30))
def test_whole_parameters_lie_in_one_shard_each(seed: int):
    rng = random.Random(seed)
    shards = rng.choice([1, 2, 3, 5, 8])
    specs = [
        ParamSpec(f"p{i}", (rng.choice([0, 3, 64, 200, 1000]),), DENSE, whole=rng.random() < 0.6)
        for i in range(rng.randint(1, 40))
    ]
    layout = plan_buffer(
        specs, bucket_size=rng.choice([None, 100, 700]), shards=shards, sharded=True, high_busbw=rng.random() < 0.2
    )
    assert sorted(slot.name for slot in layout.slots) == sorted(spec.name for spec in specs)
    whole = {spec.name for spec in specs if spec.whole}
    position = 0
    for bucket in layout.buckets:
        assert bucket.start == position and bucket.numel % math.lcm(shards, 128) == 0
        position = end = bucket.start
        for slot in bucket.slots:
            assert slot.start >= end and slot.start % 64 == 0 and slot.end <= bucket.end
            end = slot.end
            if slot.name in whole:
                bounds = [bucket.shard_of(rank) for rank in range(shards)]
                first, last = slot.start - bucket.start, slot.end - bucket.start
                assert any(low <= first and last <= high for low, high in bounds), slot
        assert len({slot.name in whole for slot in bucket.slots}) == 1
        position = bucket.end
    assert position == layout.numel


def test_whole_parameters_are_spread_by_size():
    specs = [ParamSpec(f"p{i}", (size,), DENSE, whole=True) for i, size in enumerate((256, 640, 384, 128, 128))]
    (bucket,) = plan_buffer(specs, bucket_size=None, shards=2, sharded=True).buckets
    # Largest first into the emptiest shard: 640 | 384 + 256, then 128 to each.
    assert [(slot.name, slot.start) for slot in bucket.slots] == [
        ("p1", 0),
        ("p4", 640),
        ("p2", 768),
        ("p0", 1152),
        ("p3", 1408),
    ]
    assert bucket.numel == 1536


def test_a_bucket_of_whole_parameters_waits_until_its_shards_are_even():
    specs = [ParamSpec(f"p{i}", (128,), DENSE, whole=True) for i in range(8)]
    layout = plan_buffer(specs, bucket_size=128, shards=4, sharded=True)
    assert [len(bucket.slots) for bucket in layout.buckets] == [4, 4]
    assert layout.numel == 8 * 128


def test_buckets_of_one_buffer_are_launched_by_index_wherever_their_parameters_were_registered() -> None:
    shapes = [(2, 3), (5,), (4, 4), (7,), (3, 3)]
    specs = [ParamSpec(f"p{i}", shape, DENSE, False, len(shape) == 2) for i, shape in enumerate(shapes)]
    buffer = plan_buffer(specs, bucket_size=1, shards=2, sharded=True)
    count = len(buffer.buckets)
    assert count > 2
    assert launch_order(ParamLayout((buffer,)), [spec.name for spec in specs]) == tuple((0, i) for i in range(count))

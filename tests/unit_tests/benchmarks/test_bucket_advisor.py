"""The bucket size advisor: queues worked out by hand, fits of made-up times, and a recorded backward."""

import math

import pytest
import torch
from torch import nn

from benchmarks.bucket_advisor import (
    BackwardTimes,
    advise_bucket_size,
    buckets_of,
    default_candidates,
    exposed_after,
    fit_wire,
    record_backward,
    sent_per_byte,
)
from benchmarks.simulated_wire import Wire
from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.layout.param_layout import BufferKey, ParamSpec
from core.distributed.wire.collective_events import CollectiveEvent
from tests.unit_tests.ranks import ranks

DENSE, EXPERT = BufferKey("float32", "float32", "dp_cp"), BufferKey("bfloat16", "bfloat16", "expt_dp")


def layers(count: int, numel: int = 10, every_s: float = 1.0) -> BackwardTimes:
    """`count` parameters of `numel` floats; the last one registered is ready after `every_s`, the first one last."""
    specs = tuple(ParamSpec(f"p{i}", (numel,), DENSE) for i in range(count))
    ready = {f"p{i}": (count - i) * every_s for i in range(count)}
    return BackwardTimes(specs, ready_s=ready, end_s=count * every_s)


@pytest.mark.parametrize(
    ("buckets", "wire", "end_s", "exposed_s"),
    [
        pytest.param([(4.0, 30)], Wire(1.0, 10.0), 4.0, 4.0, id="one bucket: all of it is exposed"),
        pytest.param([(4.0, 30)], Wire(1.0, 10.0), 6.0, 2.0, id="one bucket, and backward goes on"),
        pytest.param([(4.0, 30)], Wire(1.0, 10.0), 99.0, 0.0, id="hidden"),
        pytest.param([(2.0, 10), (2.0, 10), (2.0, 10)], Wire(1.0, 10.0), 2.0, 6.0, id="all ready at once: they queue"),
        pytest.param([(1.0, 9), (2.0, 9), (3.0, 9)], Wire(2.0, math.inf), 3.0, 4.0, id="latency only: 1+2, +2, +2"),
        pytest.param([(1.0, 9), (2.0, 3), (9.0, 6)], Wire(0.0, 3.0), 9.0, 2.0, id="bandwidth only: 4, 5, idle, 11"),
        pytest.param([(5.0, 10), (1.0, 10)], Wire(0.0, 10.0), 5.0, 2.0, id="the second may not leave before the first"),
        pytest.param([(5.0, 0), (1.0, 10)], Wire(0.0, 10.0), 5.0, 1.0, id="not even if the first sends nothing"),
        pytest.param([(1.0, 10), (None, 10)], Wire(0.0, 10.0), 1.0, 2.0, id="one without gradients leaves with it"),
        pytest.param([(1.0, 0), (2.0, 0)], Wire(7.0, 1.0), 2.0, 0.0, id="nothing to send takes no latency"),
        pytest.param([], Wire(7.0, 1.0), 2.0, 0.0, id="no buckets"),
    ],
)
def test_the_queue_of_launches(
    buckets: list[tuple[float | None, float]], wire: Wire, end_s: float, exposed_s: float
) -> None:
    assert exposed_after(buckets, wire, end_s) == exposed_s


def test_buckets_of_a_size_are_those_of_the_layout_with_the_time_of_their_last_gradient() -> None:
    times = layers(4)
    assert buckets_of(times, 10, 0.5) == [(1.0, 20.0), (2.0, 20.0), (3.0, 20.0), (4.0, 20.0)]
    assert buckets_of(times, 20, 1.0) == [(2.0, 80.0), (4.0, 80.0)]
    assert buckets_of(times, 25, 1.0) == [(3.0, 120.0), (4.0, 40.0)]  # a bucket closes when it is full
    del times.ready_s["p0"]
    assert buckets_of(times, 10, 0.5)[-1] == (None, 20.0)
    times.sharded, times.shards = True, 2
    # Each starts at a multiple of 64, the last one at 192; then padded to a multiple of 128.
    assert [nbytes for _, nbytes in buckets_of(times, 200, 1.0)] == [256 * 4.0]


def test_experts_have_buckets_of_their_own_in_the_common_launch_order() -> None:
    specs = (ParamSpec("a", (8,), DENSE), ParamSpec("expert", (8,), EXPERT), ParamSpec("b", (8,), DENSE))
    times = BackwardTimes(specs, ready_s={"b": 1.0, "expert": 2.0, "a": 3.0}, end_s=3.0)
    assert buckets_of(times, 8, 1.0) == [(1.0, 32.0), (2.0, 16.0), (3.0, 32.0)]


def test_latency_asks_for_large_buckets_and_bandwidth_for_small_ones() -> None:
    times = layers(8)
    sizes = [10, 20, 40, 80]
    costly_calls = advise_bucket_size(times, Wire(3.0, math.inf), sent_per_byte=1.0, candidates=sizes)
    # 8 calls of 3 s from 1 on: 25, 17 over. 4 from 2 on: 14, 6 over. 2 from 4 on: 10, or 8 + 3 = 11, 3 over. 1: 3 over.
    assert [each.exposed_ms for each in costly_calls.curve] == [17e3, 6e3, 3e3, 3e3]
    assert [each.buckets for each in costly_calls.curve] == [8, 4, 2, 1]
    assert costly_calls.bucket_size == 80  # of equal predictions the one with fewer launches
    slow = advise_bucket_size(times, Wire(0.0, 40.0), sent_per_byte=1.0, candidates=sizes)
    # A layer's 40 bytes take 1 s: only the last bucket is exposed.
    assert [each.exposed_ms for each in slow.curve] == [1e3, 2e3, 4e3, 8e3]
    assert slow.bucket_size == 10 and slow.exposed_ms == 1e3
    both = advise_bucket_size(times, Wire(0.8, 80.0), sent_per_byte=1.0, candidates=sizes)
    # 8 x 1.3 from 1: 11.4, 3.4 over. 4 x 1.8 from 2: 9.8 or 8 + 1.8. 2 x 2.8 from 4: 10.8. 1 x 4.8: 4.8 over.
    assert [round(each.exposed_ms) for each in both.curve] == [3400, 1800, 2800, 4800]
    assert both.bucket_size == 20
    assert "20" in next(line for line in both.table().splitlines() if "<- bucket_size" in line)


def test_default_candidates_span_from_the_model_to_its_smallest_parameter_without_twins() -> None:
    times = layers(4)
    assert default_candidates(times.specs) == [40, 29, 20, 15, 10]
    advice = advise_bucket_size(times, Wire(1.0, 40.0), sent_per_byte=1.0)
    # 29 and 40 differ (3 + 1 layers, 4), 15 makes the buckets of 20: the larger stands for both.
    assert [(each.bucket_size, each.buckets) for each in advice.curve] == [(10, 4), (20, 2), (29, 2), (40, 1)]


def test_frozen_parameters_are_not_there_and_nothing_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match="none of 0 parameters"):
        advise_bucket_size(BackwardTimes(()), Wire(0.0, 1.0), sent_per_byte=1.0)
    with pytest.raises(ValueError, match="none of 2 parameters"):
        advise_bucket_size(BackwardTimes(layers(2).specs), Wire(0.0, 1.0), sent_per_byte=1.0)
    with pytest.raises(ValueError, match=r"candidates are \[0\]"):
        advise_bucket_size(layers(2), Wire(0.0, 1.0), sent_per_byte=1.0, candidates=[0])
    empty = BackwardTimes((ParamSpec("e", (0,), DENSE),), ready_s={"e": 1.0}, end_s=1.0)
    assert advise_bucket_size(empty, Wire(5.0, 1.0), sent_per_byte=1.0).exposed_ms == 0.0


def flights(wire: Wire, sizes: list[int], launches: list[float], *, exact: bool = True) -> list[CollectiveEvent]:
    """What a step on that wire would record, half of each byte being sent."""
    events, free_s = [], 0.0
    for nbytes, launched_s in zip(sizes, launches, strict=True):
        free_s = max(free_s, launched_s) + wire.transfer_s(nbytes / 2)
        events.append(CollectiveEvent("", nbytes, launched_s=launched_s, done_s=free_s, end_is_exact=exact))
    return events


def test_a_wire_is_fitted_from_buckets_of_two_sizes_that_queued_behind_each_other() -> None:
    wire = Wire(0.25, 800.0)
    steps = [flights(wire, [400, 400, 400], [1.0, 1.0, 9.0]), flights(wire, [1600], [3.0])]
    fitted = fit_wire(steps, sent_per_byte=0.5)
    assert fitted.latency_s == pytest.approx(0.25) and fitted.bytes_per_s == pytest.approx(800.0)


def test_ends_that_were_only_looked_for_are_no_measurement() -> None:
    wire = Wire(0.25, 800.0)
    good = flights(wire, [400, 1600], [1.0, 9.0])
    looked = flights(wire, [400, 800], [1.0, 1.0], exact=False)
    looked[0].done_s = 5.0  # seen 3.5 s late
    looked[1].done_s, looked[1].end_is_exact = 5.75, True  # queued behind an end that is not known
    fitted = fit_wire([good, looked], sent_per_byte=0.5)
    assert fitted.latency_s == pytest.approx(0.25) and fitted.bytes_per_s == pytest.approx(800.0)
    with pytest.raises(ValueError, match="0 buckets with an exact end"):
        fit_wire([looked], sent_per_byte=0.5)
    with pytest.raises(ValueError, match="of 1 different sizes"):
        fit_wire([flights(wire, [400, 400], [1.0, 9.0])], sent_per_byte=0.5)
    shrinking = flights(wire, [400, 1600], [1.0, 9.0])
    shrinking[1].done_s = 9.1
    with pytest.raises(ValueError, match="larger buckets did not take longer"):
        fit_wire([shrinking], sent_per_byte=0.5)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_a_recorded_backward_knows_every_gradients_time_and_leaves_no_hook(
    rank: int, world: int, strategy: str
) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[0].bias.requires_grad_(False)
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=1
    )
    ddp = DistributedDataParallel(None, config, model)
    ticks = iter(range(100))
    x = torch.ones(2, 4)
    output = model[1](model[0](x))  # model[2] has no gradient
    with record_backward(ddp, clock=lambda: next(ticks)) as times:
        output.sum().backward()
    finalize_model_grads([ddp])
    assert [spec.name for spec in times.specs] == ["0.weight", "1.weight", "1.bias", "2.weight"]
    assert set(times.ready_s) == {"0.weight", "1.weight", "1.bias"}
    assert times.ready_s["0.weight"] == 3 and times.end_s == 4 and {1, 2} < set(times.ready_s.values())
    assert times.sharded == (strategy == "optim") and (not times.sharded or times.shards == 2)
    planned = [nbytes for _, nbytes in buckets_of(times, 1, 1.0)]
    assert planned == [bucket.nbytes for bucket in ddp.reducer.buckets]  # the buckets that the wrapper itself made
    assert sent_per_byte(ddp.step_report()) == pytest.approx(1.0 if strategy == "no_shard" else 0.5)
    ddp.zero_grad_buffer()
    model(x).sum().backward()
    assert next(ticks) == 5  # begin, three gradients and the end; nothing since
    finalize_model_grads([ddp])

"""What was hidden and what exposed: intervals that one can check by hand, fake CUDA events, and real steps."""

import contextlib
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.simulated_wire import Wire, put_on_wire
from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.wire.collective_events import CollectiveEvent, HostClock, StreamClock, resolve
from core.distributed.wire.collectives import Handle
from core.distributed.wire.overlap import OverlapReport, covered, measure_overlap
from core_train.plots import draw_bucket_timeline
from core_train.step_trace import Span, StepTrace
from tests.unit_tests.ranks import ranks


def event(
    number: int, launched: float, done: float, waited: tuple[float, float], **rest: float | bool
) -> CollectiveEvent:
    start, end = waited
    return CollectiveEvent(f"bucket {number}", 1024, launched, None, done, start, end, **rest)


@pytest.mark.parametrize(
    ("intervals", "length"),
    [([], 0), ([(1, 3)], 2), ([(1, 3), (2, 5)], 4), ([(4, 5), (1, 2)], 2), ([(0, 9), (1, 2)], 9), ([(3, 1)], 0)],
)
def test_the_length_of_a_union(intervals: list[tuple[float, float]], length: float) -> None:
    assert covered(intervals) == length


def test_time_waited_is_the_sum_of_waits_and_time_in_flight_a_union() -> None:
    # Backward ends at 10. Bucket 0 was done at 8, bucket 1 ends at 12, bucket 2 at 15. Each is waited for in turn.
    events = [event(0, 1, 8, (10, 10)), event(1, 5, 12, (10, 12)), event(2, 9, 15, (12, 15))]
    assert [each.exposed_s for each in events] == [0, 2, 3]
    overlap = measure_overlap(events)
    assert overlap.flight_ms == 14e3 and overlap.exposed_ms == 5e3  # from 1 to 15 something was in flight
    assert overlap.hidden_share == pytest.approx(9 / 14)


def test_all_exposed_is_a_share_of_nothing_hidden_and_nothing_in_flight_too() -> None:
    assert measure_overlap([event(0, 10, 14, (10, 14))]).hidden_share == 0.0
    assert measure_overlap([event(0, 10, 14, (20, 20))]).hidden_share == 1.0
    assert measure_overlap([event(0, 10, 11, (10, 14))]).hidden_share == 0.0  # a wait that also copies, no less than 0
    assert measure_overlap([]).hidden_share == 0.0
    assert measure_overlap([CollectiveEvent("never launched", 4)]).flight_ms == 0.0


def test_how_late_an_end_was_seen_bounds_the_share_from_below() -> None:
    # In flight from 0; seen on its way at 3, done at 8; then one of which the wait saw the end.
    looked = event(0, 0, 8, (8, 8))
    looked.in_flight_s = 3
    waited = event(1, 8, 12, (10, 12), end_is_exact=True)
    overlap = measure_overlap([looked, waited])
    assert (overlap.flight_ms, overlap.exposed_ms, overlap.seen_late_ms) == (12e3, 2e3, 5e3)
    assert overlap.hidden_share == pytest.approx(10 / 12)
    assert overlap.hidden_share_at_least == pytest.approx(5 / 7)
    looked.in_flight_s = None  # never looked at: it may have been done at once
    assert measure_overlap([looked, waited]).seen_late_ms == 8e3


def test_the_table_shows_totals_and_one_line_a_collective_in_milliseconds() -> None:
    first = event(0, 0.001, 0.004, (0.003, 0.004))
    text = OverlapReport((first,), (event(1, 0.5, 0.502, (0.502, 0.502)),)).table()
    rows = [line.split() for line in text.splitlines() if line]
    assert rows[1] == ["reductions", "3.00", "3.00", "1.00", "67%", "0%"]
    assert rows[2] == ["gathers", "2.00", "2.00", "0.00", "100%", "0%"]
    assert rows[4] == ["bucket", "0", "1.0", "0.00", "3.00", "3.00", "1.00"]
    assert rows[6] == ["bucket", "1", "1.0", "0.00", "2.00", "2.00", "0.00"]


def test_a_look_right_before_the_wait_makes_its_end_exact() -> None:
    clock, flight = HostClock(), Handle(works=(_Work(),))
    mark = CollectiveEvent("bucket 0", 4)
    clock.mark(mark, "launched_s")
    assert not clock.look(mark, flight.is_done)
    clock.end(mark)
    assert mark.done_s == mark.wait_end_s and mark.end_is_exact
    seen = CollectiveEvent("bucket 0", 4)
    clock.mark(seen, "launched_s")
    assert clock.look(seen, Handle().is_done)
    clock.end(seen)
    assert seen.done_s < seen.wait_end_s and not seen.end_is_exact


class _Work:
    """A backend's work that is never done by itself."""

    def __init__(self) -> None:
        self.waits = 0

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self.waits += 1


class _FakeGpu:
    """Two streams, each with a time of its own in ms; events record the time of the stream that is current."""

    def __init__(self) -> None:
        self.now = {"model": 1000.0, "side": 1000.0}
        self.stream = "model"
        self.synchronized = 0

    @contextlib.contextmanager
    def on_side(self):  # noqa: ANN202
        self.stream = "side"
        yield
        self.stream = "model"

    def new_event(self):  # noqa: ANN202
        gpu = self

        class Event:
            def record(self) -> None:
                self.ms = gpu.now[gpu.stream]

            def elapsed_time(self, other: "Event") -> float:
                return other.ms - self.ms

            def synchronize(self) -> None:
                gpu.synchronized += 1

        return Event()


def test_on_cuda_marks_are_events_and_become_seconds_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _FakeGpu()
    clock = StreamClock(gpu.new_event, gpu.on_side)
    clock.begin_step()
    mark, work = CollectiveEvent("bucket 0", 4), _Work()
    monkeypatch.setattr(time, "perf_counter", lambda: 500.0)
    clock.mark(CollectiveEvent("bucket before", 4), "launched_s")
    monkeypatch.setattr(time, "perf_counter", lambda: 600.0)  # the host's time counts once a step
    gpu.now["model"] = 1002.0
    clock.mark(mark, "launched_s")
    gpu.now["side"] = 1010.0  # when the side stream has waited for the collective
    clock.follow(mark, [work])
    assert work.waits == 1
    assert not clock.look(mark, work.is_completed) and mark.in_flight_s is None  # the side stream knows
    gpu.now["model"] = 1006.0
    clock.mark(mark, "wait_start_s")
    gpu.now["model"] = 1010.5
    clock.end(mark)
    assert mark.wait_end_s is None and gpu.synchronized == 0
    resolve([mark])
    times = [mark.launched_s, mark.done_s, mark.wait_start_s, mark.wait_end_s]
    assert times == pytest.approx([500.002, 500.010, 500.006, 500.0105], abs=1e-7)
    assert gpu.synchronized == 4 and mark.end_is_exact
    assert measure_overlap([mark]).exposed_ms == pytest.approx(4.5)
    resolve([mark])
    assert gpu.synchronized == 4
    later = CollectiveEvent("bucket 1", 4)
    clock.begin_step()
    clock.mark(later, "launched_s")  # a new step counts from its own first mark
    gpu.now["model"] = 1011.5
    clock.begin_step()
    clock.mark(later, "wait_end_s")  # but an event keeps its scale
    resolve([later])
    assert (later.launched_s, later.wait_end_s) == (600.0, pytest.approx(600.001, abs=1e-7))


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.in_suite(1)
def test_a_step_on_a_slow_wire_reports_what_the_wire_took(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    wire = Wire(15e-3, 1e12)  # so long that a rank may lose its core for a while between two lines
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        overlap_param_gather=strategy != "no_shard",
        bucket_size=1,
        data_parallel_sharding_strategy=strategy,
    )
    ddp = DistributedDataParallel(None, config, nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
    put_on_wire(ddp, wire)
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp(torch.ones(2, 4)).sum().backward()
        finalize_model_grads([ddp])
        ddp.start_param_sync()
    report = ddp.overlap_report()
    assert [e.label for e in report.reductions] == ["bucket 0", "bucket 1"]
    assert report.of_reductions.flight_ms >= 30.0 - 1e-3  # two latencies, one after the other
    # Exposed is all that this rank did not spend elsewhere: on a busy machine it may lose its core between two lines.
    first, last = report.reductions
    elsewhere_s = first.wait_start_s - first.launched_s + last.wait_start_s - first.wait_end_s
    assert report.of_reductions.exposed_ms >= report.of_reductions.flight_ms - 1e3 * elsewhere_s - 0.1
    assert report.of_reductions.exposed_ms <= report.of_reductions.flight_ms + 1.0
    assert ddp.step_report().hidden_share == report.of_reductions.hidden_share
    gathered = [] if strategy == "no_shard" else ["parameters of bucket 1", "parameters of bucket 0"]
    assert [e.label for e in report.gathers] == gathered  # the forward's order
    if report.gathers:
        assert report.of_gathers.flight_ms >= 30.0 - 1e-3


@ranks(4)
def test_the_sum_across_optimizer_instances_is_an_event_of_its_own(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    for strategy in ("optim", "optim_grads"):
        config = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            bucket_size=1,
            data_parallel_sharding_strategy=strategy,
            num_distributed_optimizer_instances=2,
        )
        ddp = DistributedDataParallel(None, config, nn.Linear(16, 16, bias=False))
        ddp(torch.ones(2, 16)).sum().backward()
        finalize_model_grads([ddp])
        inside, across = ddp.overlap_report().reductions
        assert (inside.nbytes, across.nbytes) == (1024, 512)
        assert across.name == f"{inside.name} across instances"
        assert inside.wait_end_s <= across.launched_s <= across.wait_end_s
        assert ddp.describe().count("1024 bytes") >= 1


@ranks(2)
def test_where_every_microbatch_is_reduced_each_round_has_its_events(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    config = DistributedDataParallelConfig(
        bucket_size=1,
        overlap_grad_reduce=True,
        data_parallel_sharding_strategy="optim_grads",
        reduce_microbatches="every",
    )
    ddp = DistributedDataParallel(None, config, nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
    for _ in range(3):
        ddp(torch.ones(2, 4)).sum().backward()
    finalize_model_grads([ddp])
    events = ddp.overlap_report().reductions
    assert [e.label for e in events] == ["bucket 0"] * 3 + ["bucket 1"] * 3
    assert all(e.launched_s <= e.done_s <= e.wait_end_s for e in events)
    assert events[0].wait_end_s <= events[1].launched_s
    ddp.zero_grad_buffer()
    ddp(torch.ones(2, 4)).sum().backward()
    finalize_model_grads([ddp])
    assert len(ddp.overlap_report().reductions) == 2


def test_a_settled_trace_keeps_the_gathers_that_its_own_step_waited_for() -> None:
    early, own = event(0, 0, 3, (2, 3)), event(1, 3, 6, (5, 6))  # launched before the step both, waited for in it one
    trace = StepTrace(0, 2, spans=[Span("forward", 4.0, 9.0)], gathers=[early, own])
    trace.settle()
    assert trace.gathers == [own] and trace.start_s == 4.0


def test_a_report_becomes_a_trace_and_a_picture(tmp_path: Path) -> None:
    reductions = (event(0, 2, 8, (7, 8)), event(1, 5, 12, (8, 12)))
    gather = CollectiveEvent("parameters of bucket 0 (a .. b)", 1024, 1, None, 3, 2, 3)
    trace = StepTrace(1, 4, buckets=[*reductions], gathers=[gather])
    assert (trace.start_s, trace.end_s) == (1, 12)
    pytest.importorskip("matplotlib")
    draw_bucket_timeline(tmp_path / "step.png", trace)
    assert (tmp_path / "step.png").stat().st_size > 5000

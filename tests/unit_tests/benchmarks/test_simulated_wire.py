"""A simulated wire: its arithmetic with a fake clock, and real gradients under it."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.simulated_wire import SimulatedCollectives, Transfer, Wire, WireQueue, put_on_wire
from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.wire.collectives import Collectives, Handle
from tests.unit_tests.ranks import ranks


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def test_a_transfer_takes_the_latency_and_its_bytes_over_the_bandwidth() -> None:
    assert Wire(0.5, 100.0).transfer_s(150) == 2.0
    assert Wire(0.5, math.inf).transfer_s(1e12) == 0.5
    assert Wire(0.0, 4.0).transfer_s(0) == 0.0


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "word"),
    [(-1.0, 1.0, "latency_s is -1.0"), (math.inf, 1.0, "latency_s is inf"), (0.0, 0.0, "bytes_per_s is 0.0")],
)
def test_a_wire_that_cannot_be_is_refused(latency_s: float, bytes_per_s: float, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Wire(latency_s, bytes_per_s)


def test_transfers_follow_one_another_on_one_wire_and_a_free_wire_waits_for_no_one() -> None:
    time = FakeTime()
    queue = WireQueue(Wire(1.0, 10.0), time.clock, time.sleep)
    first, second = queue.send(20), queue.send(50)  # launched together: 1 + 2 s, then 1 + 5 s behind it
    assert (first.done_s, second.done_s) == (103.0, 109.0)
    time.now_s = 200.0
    assert queue.send(10).done_s == 202.0


def test_a_transfer_is_done_when_its_time_has_come_and_a_wait_sleeps_until_then() -> None:
    time = FakeTime()
    transfer = Transfer(WireQueue(Wire(0.0, 1.0), time.clock, time.sleep), 103.0)
    time.now_s = 102.0
    assert not transfer.is_completed()
    transfer.wait()
    assert time.slept == [1.0] and time.now_s == 103.0 and transfer.is_completed()
    transfer.wait()
    assert time.slept == [1.0]


class Counting(Collectives):
    """Stands for real collectives: each counts 40 bytes, and notes when its result is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.finished: list[str] = []

    def start_all_reduce(self, tensor, group, op, scale):  # noqa: ANN001, ANN201
        self.traffic.count(40)
        return Handle(finish=lambda: self.finished.append("all_reduce"))


def test_collectives_on_a_wire_count_once_and_finish_after_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    time, inner = FakeTime(), Counting()
    wired = SimulatedCollectives(inner, WireQueue(Wire(2.0, 10.0), time.clock, time.sleep))
    flight = wired.all_reduce(torch.ones(10), None, "test")
    assert not flight.is_done() and inner.finished == []
    flight.wait()
    assert inner.finished == ["all_reduce"] and time.slept == [6.0]  # 2 + 40 / 10
    assert (wired.traffic.bytes_sent, wired.traffic.collectives) == (40, 1)
    wired.all_reduce(torch.ones(10), None, "test").wait()
    assert time.slept == [6.0, 6.0]  # its own 40 bytes, not all that were ever counted
    nothing = wired.all_reduce(torch.ones(0), None, "test")
    assert nothing.is_done()
    nothing.wait()
    assert time.slept == [6.0, 6.0]


def test_a_model_on_a_gpu_is_refused_because_its_streams_would_go_on() -> None:
    on_gpu = SimpleNamespace(plan=SimpleNamespace(device=torch.device("cuda:1")))
    with pytest.raises(ValueError, match="cuda:1"):
        put_on_wire(on_gpu, Wire(0.0, 1.0))


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.in_suite()
def test_gradients_and_parameters_are_the_same_under_a_wire_and_no_step_is_faster_than_it(
    rank: int, world: int, strategy: str, dtype: torch.dtype | None
) -> None:
    parallel_state.initialize_model_parallel()
    wire = Wire(2e-3, 1e9)
    found = {}
    for simulated in (None, wire):
        torch.manual_seed(5)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        config = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            bucket_size=1,
            data_parallel_sharding_strategy=strategy,
            grad_communication_dtype=dtype,
        )
        ddp = DistributedDataParallel(None, config, model)
        if simulated is not None:
            put_on_wire(ddp, simulated)
        x = torch.arange(32.0).reshape(2, 16) * (rank + 1) / 32
        ddp(x).square().sum().backward()
        finalize_model_grads([ddp])
        report = ddp.overlap_report()
        found[simulated] = [bucket.valid_grad.clone() for bucket in ddp.reducer.buckets]
        assert len(report.reductions) == 8 == ddp.step_report().collectives
        if simulated is not None:
            launched = [event.launched_s for event in report.reductions]
            ends = [event.wait_end_s for event in report.reductions]
            for index, end in enumerate(ends, start=1):
                assert end - launched[0] >= index * wire.latency_s - 1e-6, (index, ends, launched)
    assert torch.cat(found[None]).abs().max() > 0.1  # one by one they may be padding
    for plain, wired in zip(found[None], found[wire], strict=True):
        assert torch.equal(plain, wired)

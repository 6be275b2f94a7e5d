"""A measured device: figures that a plan reads, and what cannot be measured."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import host_device
from benchmarks.host_device import GPTS, operator_costs
from core_plan import Link, plan_run, read_device
from core_plan.calibrate import Clock, attention_rate, line
from core_plan.command import main
from core_plan.device import FILES, known_devices, rate_at
from core_plan.live_memory import Work
from core_plan.step_time import work_seconds

ROOT = Path(__file__).parents[3]
TINY = ROOT / "configs" / "tiny.toml"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_machine_is_measured_on_two_ranks_and_planned_with(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    command = [sys.executable, "-m", "core", "plan", "calibrate", "--ranks", "2", "--seconds", "0.5", "--out", str(out)]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "written to" in ended.stdout
    device = read_device(str(out))
    assert device.is_host is not torch.cuda.is_available()
    rates = [
        *device.matmul_flops.values(),
        *device.attention_flops.values(),
        device.memory_bandwidth,
    ]
    assert all(1e6 < rate < 1e16 for rate in rates)
    assert 1e-7 <= device.inside.latency_s < 1 and 1e4 < device.inside.bytes_per_s < 1e13
    assert 0 <= device.operator_overhead_s < 1e-2
    assert {row[0] for row in device.collectives["all_reduce"]} == {2}
    assert (device.communicator_bytes is None) is device.is_host
    assert f"torch {torch.__version__}" in device.source and "--seconds 0.5" in device.source
    assert plan_run(TINY, 2, device).time.seconds > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ranks", "1"], "one rank has no links to measure; use --links-from"),
        (["--ranks", "0"], "--ranks 0 is not between 1 and"),
        (["--ranks", "2", "--seconds", "0"], "--seconds 0 is not between"),
        (["--ranks", "2", "--out", "mine.toml"], "mine.toml does not end in .json"),
        (["--ranks", "2", "--links-from", "b900"], "expected a100"),
        (["--ranks", "2", "--out", "/proc/none/mine.json"], "no directory that this user may write to"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and words in said


def test_a_rate_lies_between_those_of_the_sizes_around_it() -> None:
    points = [[1.0, 10.0], [100.0, 1000.0]]
    assert [rate_at(points, size) for size in (0.5, 1.0, 100.0, 1e9)] == [10.0, 10.0, 1000.0, 1000.0]
    assert rate_at(points, 10.0) == pytest.approx(100.0)
    assert rate_at([], 10.0) == 0.0


def test_attention_is_measured_by_what_is_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products forward and five backward of 4 heads, [256, 64] and [256, 256], of which half is masked."""
    clock = Clock(0.01)
    monkeypatch.setattr(clock, "device", torch.device("cpu"))
    monkeypatch.setattr(clock, "alone", lambda run: (run(), 0.5)[1])
    assert attention_rate(clock, torch.float32) == 7 * 4 * 2 * 256 * 256 * 64 / 2 / 0.5


def test_a_line_finds_latency_and_speed() -> None:
    found = line([(n, 2e-4 + n / 5e8) for n in (1e3, 1e5, 1e7)])
    assert found == pytest.approx((2e-4, 5e8))


def test_what_surrounds_an_operator_grows_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1.0)
    monkeypatch.setattr(clock, "device", torch.device("cpu"))
    own_and_rest = {size: pair for size, pair in zip(GPTS[::2], ((1e-5, 6e-6), (1.1e-4, 1.6e-5)), strict=True)}
    monkeypatch.setattr(host_device, "_own_and_rest", lambda clock, *size: own_and_rest[size])
    assert operator_costs(clock) == pytest.approx((5e-6, 0.1))  # 5 us each, and a tenth of its own time
    own_and_rest[GPTS[2]] = 1.1e-4, 5e-6  # noise: what surrounds the large ones would take less
    assert operator_costs(clock) == pytest.approx((6e-6, 0.0))


def test_a_barrier_that_ranks_leave_late_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    late = []
    monkeypatch.setattr("torch.distributed.barrier", lambda: late.append(True))
    monkeypatch.setattr("core_plan.calibrate.of_all", lambda value: [value])

    def run() -> None:
        if late:
            late.clear()
            time.sleep(0.05)  # for a rank that is still in the barrier

    clock = Clock(0.01)
    monkeypatch.setattr(clock, "device", torch.device("cpu"))
    assert clock.seconds(run) < 1e-3


def test_ranks_beyond_the_cores_take_turns() -> None:
    device = replace(
        read_device("h100"),
        is_host=True,
        cores=2,
        ranks=2,
        matmul_sizes={"float32": [[1000.0, 100.0]]},
        memory_sizes=[[10.0, 10.0]],
        operator_overhead_s=0.5,
        operators={"aten.add float32": [[10.0, 3.0], [1000.0, 30.0]]},
        collectives={"all_reduce": [[2, 1.0, 8.0], [4, 3.0, 4.0]]},
        gradients=Link(1.0, 8.0),
    )
    sums = {Work(0, size, torch.float32, "aten.add"): 1 for size in (1, 10, 1000, 2000)}
    work = {Work(1000, 10, torch.float32): 2, Work(0, 100, torch.float32): 1, **sums}
    alone = 2 * 10.5 + 10.5 + 3.5 + 3.5 + 30.5 + 60.5  # what surrounds an operator comes to its work
    assert [work_seconds(work, device.shared_by(ranks)) for ranks in (1, 2, 4)] == pytest.approx(
        [alone, alone, 2 * alone]
    )
    assert device.shared_by(4).gradients == Link(2.0, 4.0)
    assert device.shared_by(2).link("all_reduce", 4) == Link(3.0, 4.0)
    shared = replace(device, ranks=4).shared_by(4)  # they took turns when links were measured
    assert (shared.turns, shared.gradients, shared.link("all_reduce", 2)) == (2.0, Link(1.0, 8.0), Link(1.0, 8.0))


@pytest.mark.parametrize("name", known_devices())
def test_devices_of_the_package_are_read(name: str) -> None:
    assert read_device(name).name == name


H100 = json.loads((FILES / "h100.json").read_text())
LINK = {"latency_s": 1e-5, "bytes_per_s": 1e9}


BYTES = "an integer of at least 1 and at most 1000000000000000000"
RANKS = "an integer of at least 1 and at most 10000000"
RATE, SECONDS = "a number of at least 1 and at most 1e+24", "a number of at least 0 and at most 1000000.0"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {**H100, "memory_bytes": "80GB"},
            f"memory_bytes must be {BYTES}, got '80GB'",
        ),
        (
            {**H100, "memory_bytes": None},
            f"memory_bytes must be {BYTES}, got None",
        ),
        (
            {**H100, "memory_bytes": -5},
            f"memory_bytes must be {BYTES}, got -5",
        ),
        ({**H100, "memory_bandwidth": 0}, f"memory_bandwidth must be {RATE}, got 0"),
        (
            {**H100, "operator_overhead_s": math.nan},
            f"operator_overhead_s must be {SECONDS}, got nan",
        ),
        (
            {**H100, "matmul_flops": {"float32": -1.0}},
            f"matmul_flops.float32 must be {RATE}, got -1.0",
        ),
        (
            {**H100, "peak_flops": {"float32": 1e-300}},
            f"peak_flops.float32 must be {RATE}",
        ),
        ({**H100, "step_overhead_s": 1e300}, f"step_overhead_s must be {SECONDS}"),
        ({**H100, "cores": 10**400}, "cores must be an integer of at least 0 and at most 10000000, got 1000"),
        ({**H100, "matmul_flops": {"bfloat16": 1e12}}, "matmul_flops.float32 is missing"),
        (
            {**H100, "attention_flops": {"bfloat16": 0}},
            f"attention_flops.bfloat16 must be {RATE}",
        ),
        (
            {**H100, "links": {"inside": {**LINK, "hop_s": -1}, "between": LINK}},
            f"links.inside.hop_s must be {SECONDS}, got -1",
        ),
        ({**H100, "peak_flops": 3}, "peak_flops must be a table of names, got 3"),
        (
            {**H100, "ranks_per_machine": 0},
            f"ranks_per_machine must be {RANKS}, got 0",
        ),
        ({**H100, "is_host": "no"}, "is_host must be true or false, got 'no'"),
        ({**H100, "about": 3}, "about must be a text, got 3"),
        ({**H100, "links": []}, "links must be a table of names, got []"),
        ({**H100, "links": {"inside": LINK}}, "links.between is missing"),
        ({**H100, "links": {"inside": LINK, "between": LINK, "far": LINK}}, "links.far is no name there; known are"),
        (
            {**H100, "links": {"inside": LINK, "between": {**LINK, "bytes_per_s": 0}}},
            f"links.between.bytes_per_s must be {RATE}, got 0",
        ),
        ({**H100, "memory_sizes": [[1, 2], [1, 3]]}, "memory_sizes[1][0] must be more than 1 of the row before, got 1"),
        ({**H100, "collectives": {"send": [[2, 1e-5]]}}, "collectives.send[0] must be a list of 3 numbers"),
        ({**H100, "memory": 5}, "memory is no name there; known are about"),
        ([H100], "the content must be a table of names, got [{"),
        (5, "the content must be a table of names, got 5"),
    ],
)
def test_a_file_that_is_no_device_is_refused_by_the_name_of_what_is_wrong(
    table: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(table))
    assert main(["--model", str(TINY), "--ranks", "1", "--device", str(file)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: --device {file}: the file is no device: ") and words in said

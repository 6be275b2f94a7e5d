"""`python -m benchmarks optimizer`: its arithmetic, its gate and a tiny run; never a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.allocations import peak_of, temporary_bytes
from benchmarks.optimizer_arms import ARMS, PRECISIONS, Problem, StepArm, StepArmSpec, TorchArm, WrongWeights, shapes_of
from benchmarks.optimizer_step import COPY, Times, check_arms, quartiles, results_of, share_of_copy, table

SHAPES = ((3, 5), (7,), (64, 2))


def test_bytes_that_must_move_are_those_of_the_dtypes() -> None:
    moved = {
        name: (p.bytes_per_element(clipped=False), p.bytes_per_element(clipped=True)) for name, p in PRECISIONS.items()
    }
    assert moved == {
        "fp32": (4 + 8 + 8 + 8, 32),  # gradient; parameter, first and second moment read and written
        "bf16, fp32 gradients and masters": (4 + 8 + 8 + 8 + 2, 34),  # the parameter is written only
        "bf16, bf16 gradients, fp32 masters": (2 + 8 + 8 + 8 + 2, 30),
        "bf16, fp32 gradients, remainders": (4 + 8 + 8 + 4 + 4, 32),
        "bf16, bf16 gradients, remainders": (2 + 8 + 8 + 4 + 4, 28),  # parameter and remainder read and written
        "bf16, bf16 gradients and moments, remainders": (2 + 4 + 4 + 4 + 4, 20),
        "bf16 throughout, no masters": (2 + 4 + 4 + 4, 16),
    }


def test_a_row_is_bytes_over_the_median_time_and_over_the_copy() -> None:
    problem = Problem(SHAPES, PRECISIONS["fp32"])
    assert problem.numel == 150
    wall = {COPY: [2e-6, 1e-6, 9e-6], ARMS[0].name: [4e-6, 7e-6, 6e-6]}
    processor = {COPY: [1e-6], ARMS[0].name: [5e-6, 2e-6, 4e-6]}
    copy, arm = results_of(problem, ARMS[:1], Times(wall, processor), {ARMS[0].name: 3072})
    assert (arm["processor_ms"], arm["of_copy_processor"]) == (pytest.approx(4e-3), pytest.approx((28 / 4) / 8))
    assert (copy["temporary_bytes"], arm["temporary_bytes"]) == (0, 3072)
    assert table([arm]).splitlines()[-1].endswith("| 3 |")
    assert (copy["ms"], copy["of_copy"], copy["bytes_per_element"]) == (pytest.approx(2e-3), 1.0, 8)
    assert arm["ms"] == pytest.approx(6e-3) and arm["ms_quartiles"] == pytest.approx([5e-3, 6.5e-3])
    assert arm["gb_per_s"] == pytest.approx(28 * 150 / 6e-6 / 1e9)
    assert arm["of_copy"] == pytest.approx((28 / 6) / (8 / 2))
    assert share_of_copy(100, 2.0, 50, 1.0) == 1.0
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)


def test_what_a_call_allocates_for_its_time_is_counted() -> None:
    ones = torch.ones(1 << 18)  # 1 MiB
    kept: list[torch.Tensor] = []

    def call() -> None:
        first = ones + 1
        second = first + 1
        del first
        third = second * 2
        del second, third
        kept.append(ones + 3)

    found = temporary_bytes(call)
    assert 2 * ones.nbytes <= found < 2.1 * ones.nbytes
    assert temporary_bytes(kept.clear) < 0.1 * ones.nbytes
    assert peak_of([4, -4, 3, 2, -5]) == 5 and peak_of([]) == 0 and peak_of([-8, 3]) == 0


def test_ranks_share_a_workload() -> None:
    whole = shapes_of("test", 1)
    assert len(shapes_of("test", 2)) == (len(whole) + 1) // 2 and set(shapes_of("test", 2)) <= set(whole)


class HalfTheRate(TorchArm):
    """Wrong on purpose."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, flat=False, clipped=False)
        self.optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_arm_that_computes_something_else_is_refused(precision: str) -> None:
    problem = Problem(SHAPES, PRECISIONS[precision])
    specs = [spec for spec in ARMS if spec.name.startswith("torch")]

    def made(listed: list[StepArmSpec]) -> dict[str, tuple[StepArmSpec, StepArm]]:
        return {spec.name: (spec, spec.make(problem)) for spec in listed}

    check_arms(problem, made(specs))
    with pytest.raises(WrongWeights, match="half the rate: weights are 0.5 of their way off"):
        check_arms(problem, made([*specs, StepArmSpec("half the rate", False, HalfTheRate)]))


@pytest.mark.nightly
def test_a_small_run_writes_a_row_for_every_arm(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "optimizer.json"
    arguments = ["--workloads", "test", "--ranks", "1", "--rounds", "1", "--json", str(file)]
    assert main(["optimizer", *arguments]) == 0
    results = json.loads(file.read_text())["results"]
    assert [found["precision"] for found in results] == list(PRECISIONS)
    for found in results:
        assert [row["arm"] for row in found["rows"]] == [COPY, *(spec.name for spec in ARMS)]
        assert all(row["ms"] > 0 for row in found["rows"]) and found["numel"] == 14304
    assert "core, shard, clipped" in capsys.readouterr().out

"""The benchmark of the start-up: its arithmetic, its table, what it refuses, and one tiny run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import startup
from benchmarks.__main__ import main


def row(ranks: int, parameters: int, arm: str, wrap: float, strategy: str = "") -> dict[str, Any]:
    phases = {"wrap": wrap, "optimizer": 1.5, "first step": 2.5, "second step": 3.5, "wrap spread": 0.125}
    return {"ranks": ranks, "parameters": parameters, "arm": arm, "strategy": strategy, **phases}


def test_growth_is_the_exponent() -> None:
    assert startup.growth([(10, 0.3), (100, 3.0), (1000, 30.0)]) == pytest.approx(1)
    assert startup.growth([(10, 0.3), (100, 30.0)]) == pytest.approx(2)
    assert math.isnan(startup.growth([(10, 0.3)]))


def test_growths_are_of_each_arm_over_large_models_only() -> None:
    rows = [
        row(2, 1_000, "core", 9.0, "optim"),
        row(2, 10_000, "core", 0.1, "optim"),
        row(2, 100_000, "core", 1.0, "optim"),
        row(2, 10_000, "torch DDP", 2.0),
        row(1, 10_000, "core", 0.1, "optim"),
        row(1, 20_000, "core", 0.4, "optim"),
    ]
    found = startup.growths(rows)
    assert set(found) == {"core optim 2 ranks", "core optim 1 ranks"}
    assert found["core optim 2 ranks"] == pytest.approx(1)
    assert found["core optim 1 ranks"] == pytest.approx(2)


def test_the_expected_time_grows_with_the_square() -> None:
    assert startup.expected([], 1_000) == 0
    assert startup.expected([(10, 7.0), (100, 0.5)], 400) == pytest.approx(8.0)


def test_the_table_says_where_torch_was_not_run() -> None:
    rows = [row(2, 1_000, "core", 0.01, "optim"), row(2, 1_000, "torch DDP", 0.2), row(2, 5_000, "core", 0.05, "optim")]
    lines = startup.table(rows, [1_000, 5_000]).splitlines()
    assert lines[1].split() == ["2", "1000", "core", "optim", "0.010", "0.125", "10.00", "1.500", "2.500", "3.500"]
    assert lines[2].split() == ["2", "1000", "torch", "DDP", "0.200", "0.125", "200.00", "1.500", "2.500", "3.500"]
    assert lines[-1] == "torch DDP at 2 ranks: not run at 5000 parameters (too slow)"
    assert "not run" not in startup.table(rows[:2], [1_000])


def test_the_model_has_as_many_tiny_tensors_as_asked() -> None:
    for count in (1, 7, 100):
        sizes = [param.numel() for param in startup.TinyTensors(count).parameters()]
        assert len(sizes) == count and min(sizes) >= 1 and max(sizes) <= 16


@pytest.mark.parametrize("wrong", [["--parameters", "0"], ["--ranks", "0"], ["--repeat", "0"]])
def test_nothing_to_measure_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["startup", *wrong])
    assert f"{wrong[0]} 0: expected at least 1" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_tiny_run_writes_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "startup.json"
    sizes = ["--parameters", "20", "40", "--ranks", "2", "--repeat", "1", "--torch-limit", "0"]
    assert main(["startup", *sizes, "--groups-world", "256", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "torch DDP at 2 ranks: not run at 40 parameters" in printed  # the first size is always run
    written = json.loads(path.read_text())
    assert written["benchmark"] == "startup" and "torch" in written and "date" in written
    cells = {(r["parameters"], r["arm"], r["strategy"]) for r in written["results"]["rows"]}
    ours = {(size, "core", strategy) for size in (20, 40) for strategy in startup.STRATEGIES}
    assert cells == ours | {(20, "torch DDP", "")}
    assert all(r[phase] > 0 for r in written["results"]["rows"] for phase in ("wrap", "optimizer", "first step"))
    assert set(written["results"]["groups_s"]) == set(startup.groups.LAYOUTS)

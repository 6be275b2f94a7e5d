"""The benchmark of plans: its table, which rows it names as misses, and one tiny run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan
from benchmarks.__main__ import main
from benchmarks.plan_rows import ROWS


def row(name: str, **changes: Any) -> dict[str, Any]:
    figures = {"planned_bytes": 3 * 2**20, "measured_bytes": 3 * 2**20, "planned_s": 0.2, "step_s": 0.2}
    return {
        "run": name,
        "ranks": 2,
        "held_out": False,
        "states_exact": True,
        "activations_ratio": 1.0,
        **figures,
        **changes,
    }


def test_the_table_names_what_misses_an_aim() -> None:
    rows = [
        row("dp 2", planned_s=0.22),
        row("opt", held_out=True, activations_ratio=1.08, planned_bytes=int(3.3 * 2**20)),
        row("pp 2", planned_s=0.16, states_exact=False),
    ]
    lines = plan.table(rows).splitlines()
    assert lines[2] == "| 2 | dp 2 | 3.00 MiB | 3.00 MiB | 1.000 | 1.000 | 220.0 ms | 200.0 ms | 1.10 |"
    assert lines[3].startswith("| 2 | opt (held out) | 3.30 MiB | 3.00 MiB | 1.100 | 1.080 |")
    assert lines[-3:] == [
        "states not to the byte: pp 2",
        "activations off by more than 5%: opt",
        "time off by more than 15%: pp 2",
    ]


def test_ten_layouts_and_five_models_at_all_numbers_of_ranks_are_held_against_runs() -> None:
    assert sum(not row.family for row in ROWS) >= 10
    assert len({row.family for row in ROWS if row.family}) == 5
    assert len({row.family for row in ROWS if row.held_out}) == 2
    assert {row.ranks for row in ROWS} == {1, 2, 4, 8}


@pytest.mark.nightly
def test_memory_of_a_tiny_run_is_as_planned(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = tmp_path / "plan.json"
    wanted = ["--rows", "gpt2", "pp 2", "dp 4", "mistral, dp 2"]
    assert main(["plan", "--tiny", "--seconds", "1", *wanted, "--json", str(result)]) == 0
    rows = json.loads(result.read_text())["results"]["rows"]
    assert len(rows) >= 4
    for found in rows:
        assert found["states_exact"], found
        assert found["activations_ratio"] == pytest.approx(1.0, abs=0.05), found

"""The benchmark of the watch: one tiny run with all of its rows, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main


def test_a_tiny_run_has_a_row_for_each_layout_and_arm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    main(["first_steps", "--models", "test", "--steps", "1", "--repeat", "1", "--json", str(file)])
    rows = json.loads(file.read_text())["results"]
    assert [(row["layout"], row["first_steps"]) for row in rows] == [
        (layout, arm) for layout in ("dp 2", "tp 2", "ZeRO-3") for arm in ("check", "ignore", "difference")
    ]
    for checked, ignored, difference in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        for phase in ("step 1", "step 2", "later", "compare"):
            assert checked[phase] > 0 and ignored[phase] > 0
            assert difference[phase] == pytest.approx(checked[phase] - ignored[phase]), "of the one turn"
    _, *lines, _ = capsys.readouterr().out.splitlines()
    assert [line.count("|") for line in lines] == [9] * (2 + len(rows)), "a table for a page"
    assert lines[-1].startswith("| ZeRO-3 | GPT, 0.")


def test_no_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["first_steps", "--steps", "0"])
    assert "--steps 0: expected at least 1" in capsys.readouterr().err

"""`python -m benchmarks same_bits`: the same code trains to the recorded bits, and other bits are seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import same_bits


def test_recorded_layouts_are_trained_again_and_a_changed_digest_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bits.json"
    few = ["--max-ranks", "1", "--every", "9"]
    assert same_bits.main(["record", str(file), *few]) == 0
    recorded = json.loads(file.read_text())
    assert len(recorded["cases"]) > 1 and len({case["digest"] for case in recorded["cases"]}) > 1
    changed = recorded["cases"][1]
    before, changed["digest"] = changed["digest"], "0" * 16
    file.write_text(json.dumps(recorded))
    assert same_bits.main(["compare", str(file), "--max-ranks", "1"]) == 1
    said = capsys.readouterr().out
    assert f"{len(recorded['cases'])} cases, 1 differ, 0 failed" in said and f"now    {before}" in said

"""The benchmark of Hugging Face models: which losses it refuses, its table, and one tiny run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import hugging_face
from benchmarks.__main__ import main


def test_an_arm_with_other_losses_is_named() -> None:
    losses = {hugging_face.REFERENCE: [6.0, 5.0], "ours": [6.0, 5.0001]}
    hugging_face.refuse_other_losses(losses)
    with pytest.raises(RuntimeError, match=r"ours: losses .*5\.01"):
        hugging_face.refuse_other_losses({**losses, "ours": [6.0, 5.01]})
    with pytest.raises(RuntimeError, match="hardly move"):
        hugging_face.refuse_other_losses({hugging_face.REFERENCE: [6.0, 6.0001]})


def test_the_table_sets_the_split_llama_next_to_our_own_gpt() -> None:
    rows = [
        {"arm": arm, "step_ms": ms, "processor_ms": ms / 2, "ratio": ms / 100, "least": 0.5, "most": 2.0}
        for arm, ms in ((hugging_face.REFERENCE, 100.0), ("ours, tp 2", 84.0), (hugging_face.BY_GPT, 80.0))
    ]
    lines = hugging_face.table(rows).splitlines()
    assert lines[3] == "| ours, tp 2 | 84.0 ms | 0.84 | 0.50, 2.00 | 42.0 ms |"
    assert lines[-1] == "ours, tp 2 over our own GPT, tp 2: 1.05"


@pytest.mark.nightly
def test_a_tiny_run_of_all_parts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert main(["hugging_face", "--tiny", "--rounds", "2", "--tokens", "16", "--json", str(tmp_path / "f.json")]) == 0
    printed = capsys.readouterr().out
    assert all(arm in printed for arm in hugging_face.ARMS)
    assert "read_GiB" in printed and "modules" in printed
    assert (tmp_path / "f.json").exists()

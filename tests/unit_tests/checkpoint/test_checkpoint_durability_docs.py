"""The page on durable checkpoints: its program saves, stops and loads as it says; it quotes what the code says."""

import re
from pathlib import Path

import pytest
import torch

from core.checkpoint.directory import find_intact, list_steps
from core.checkpoint.saver import SaveReport
from tests.unit_tests.checkpoint.checkpoint_saves import save_alone
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page

PAGE = ROOT / "docs" / "source" / "checkpoints_durability.md"


@ranks(1, 2)
def test_the_program_of_the_page_stops_in_step_8_and_loads_it(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(PAGE, monkeypatch)
    assert names["step"] == 8 and names["report"].step == 8
    assert list_steps(names["root"][0]) == [6, 8]
    assert names["stop"].reason == f"rank {world - 1} got SIGTERM"
    assert torch.isfinite(names["model"].module.weight).all()


def test_the_quoted_warning_and_fields_are_what_the_code_says(tmp_path: Path) -> None:
    text = PAGE.read_text()
    save_alone(tmp_path, 6, 8)
    path = tmp_path / "step_00000008.0002" / "rank_00000_000.distcp"
    data = bytearray(path.read_bytes())
    data[900] ^= 1
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning) as heard:
        find_intact(tmp_path)
    said = str(heard[0].message)
    (quoted,) = re.findall(r"```text\n(Checkpoint of step 8.*?)```", text, flags=re.DOTALL)

    def without_values(message: str) -> str:
        for pattern in (r"\S*/(?=step_)", r"[0-9a-f]{8}", r"rank_\d+_\d+", r"\d+", r"'[^']*'"):
            message = re.sub(pattern, "", message)
        return " ".join(message.split())

    assert without_values(said) == without_values(quoted)
    for field in re.findall(r"^\| (`.*?`) \|", text.split("field of `SaveReport`")[1], flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)`", field):
            assert name in SaveReport.__dataclass_fields__, name

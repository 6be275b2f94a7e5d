"""The page on Hugging Face models runs and does what it says."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page

PAGE = ROOT / "docs" / "source" / "hugging_face.md"


@ranks(4)
def test_the_page_on_hugging_face_models_does_what_it_says(rank: int, world: int) -> None:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("builtins.print", lambda text: lines.extend(text.splitlines()))
        names = run_page(PAGE, monkeypatch)
    said = PAGE.read_text().split("```text\n")[1].split("```")[0].splitlines()
    assert [line for line in said if line not in lines] == []
    losses = names["losses"]
    assert losses[0] - losses[-1] > 0.05
    assert len(names["report"].partial) == 4
    assert torch.isfinite(torch.tensor(losses)).all()

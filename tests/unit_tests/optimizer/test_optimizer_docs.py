"""The page on the optimizer: its program runs, every precision of it learns, its table is the formula's."""

from __future__ import annotations

import re

import pytest

from benchmarks.memory import PRECISIONS, STRATEGIES, formula
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page

PAGE = ROOT / "docs" / "source" / "optimizer.md"


@ranks(2)
def test_every_precision_of_the_page_learns_as_fp32_does(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(PAGE, monkeypatch, end="## Algorithms")
    reference = names["in_fp32"]
    assert reference[-1] < 0.2 * reference[0]
    runs = {name: losses for name, losses in names.items() if name.startswith(("in_bf16", "in_fp16"))}
    assert len(runs) == 3
    for name, losses in runs.items():
        assert losses == pytest.approx(reference, rel=0.1, abs=0.01), name
    # The same training in 2 bytes less, but for ties of a parameter's rounding.
    assert names["in_bf16_with_remainders"] == pytest.approx(names["in_bf16"], rel=1e-2)
    for name in ("with_autocast", "with_a_scaler"):
        assert names[name] == pytest.approx(reference, rel=0.1, abs=0.01) and names[name] != reference, name
    assert names["norm"] > 0 and not names["found_inf"]


def test_the_table_of_the_page_is_that_of_the_formula() -> None:
    rows = re.findall(r"^\| (.+?) +\| (\d) +\| ([\d. |]+) +\|", PAGE.read_text(), flags=re.MULTILINE)
    cells = {(name, int(count)): text.split("|") for name, count, text in rows}
    assert cells.keys() == {(name, 4) for name in PRECISIONS}
    for (name, count), row in cells.items():
        for strategy, says in zip(STRATEGIES, row, strict=True):
            assert float(says) == pytest.approx(formula(PRECISIONS[name], strategy, count), abs=0.006), (name, count)

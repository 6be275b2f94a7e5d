"""The page on the optimizer: its program runs, every precision of it learns, its table is what is measured."""

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
        names = run_page(PAGE, monkeypatch)
    reference = names["in_fp32"]
    assert reference[-1] < 0.2 * reference[0]
    runs = {name: losses for name, losses in names.items() if name.startswith(("in_bf16", "in_fp16"))}
    assert len(runs) == 5
    for name, losses in runs.items():
        assert losses == pytest.approx(reference, rel=0.1, abs=0.01), name
    # The same training in 2 bytes less, but for ties of a parameter's rounding.
    assert names["in_bf16_with_remainders"] == pytest.approx(names["in_bf16"], rel=1e-2)
    for name in ("with_autocast", "with_a_scaler"):
        assert names[name] == pytest.approx(reference, rel=0.1, abs=0.01) and names[name] != reference, name
    assert names["updated"] and names["joint_norm"] > 0


def test_the_table_of_the_page_is_that_of_the_formula_and_within_5_percent_of_what_was_measured() -> None:
    rows = re.findall(r"^\| (.+?) +\| (\d) +\| ([\d./ |]+) +\|", PAGE.read_text(), flags=re.MULTILINE)
    cells = {
        (name, int(ranks_)): [c.split("/") for c in text.split("|")[: len(STRATEGIES)]] for name, ranks_, text in rows
    }
    assert cells.keys() == {(name, count) for name in PRECISIONS for count in (2, 4)}
    for (name, count), row in cells.items():
        for strategy, (says, measured) in zip(STRATEGIES, row, strict=True):
            assert float(says) == pytest.approx(formula(PRECISIONS[name], strategy, count), abs=0.006), (name, count)
            assert float(measured) == pytest.approx(float(says), rel=0.05), (name, count)

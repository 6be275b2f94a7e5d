"""The part of the optimizer's page about algorithms, groups and schedules runs, and does what the text says."""

import math

import pytest
import torch

from core.optimizer.algorithms import backends
from core.optimizer.algorithms.newton_schulz import coefficients_of
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page

PAGE = ROOT / "docs" / "source" / "optimizer.md"


@ranks(4, timeout_s=120)
def test_the_page_on_algorithms_does_what_it_says(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(PAGE, monkeypatch, begin="## Algorithms")
    losses = names["losses"]
    assert losses[-1] < losses[0] - 0.5, losses
    groups = {group["name"]: group for group in names["optimizer"].param_groups}
    # Plain "adam" is the position embedding: no hidden layer's matrix, and not tagged.
    assert set(groups) == {"muon", "muon lr_mult=0.5", "adam", "adam wd_mult=0.0", "adam max_lr decoupled"}
    n = 30 * 16
    half = 0.002 + 0.018 * (1 + math.cos(math.pi * (n - 80) / 400)) / 2
    assert groups["muon"]["lr"] == pytest.approx(half) and groups["muon lr_mult=0.5"]["lr"] == pytest.approx(half / 2)
    assert groups["adam max_lr decoupled"]["lr"] == pytest.approx(0.002 + 0.008 * (half - 0.002) / 0.018)
    assert {name: group["weight_decay"] for name, group in groups.items() if group["weight_decay"] == 0} == {
        "adam wd_mult=0.0": 0.0
    }
    report = backends.report(names["optimizer"])
    assert "Muon on cpu" in report and "adam on cpu: fused" in report
    assert any(isinstance(member, torch.optim.Adafactor) for member in names["factored"].optimizer.members)


@pytest.mark.parametrize(("kind", "steps", "words"), [("simple", 5, "0.68 to 1.14"), ("quintic", 5, "0.97 to 1.04")])
def test_the_table_of_singular_values_is_right(kind: str, steps: int, words: str) -> None:
    s = torch.logspace(math.log10(0.02), 0, 4000, dtype=torch.float64)
    for a, b, c in coefficients_of(kind, steps):
        s = a * s + b * s**3 + c * s**5
    low, high = (float(word) for word in words.split(" to "))
    assert low <= s.min() < low + 0.01 and high - 0.01 < s.max() <= high
    assert words in " ".join(PAGE.read_text().split())

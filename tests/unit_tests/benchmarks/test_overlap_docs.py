"""The program of benchmarks/overlap.md runs, and the report is one of what it did."""

import pytest
import torch

from core.distributed.wire.collective_events import CollectiveEvent
from core.distributed.wire.overlap import OverlapReport
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page


@ranks(2)
def test_the_page_on_overlap_reports_draws_and_advises(rank: int, world: int) -> None:
    pytest.importorskip("matplotlib")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(ROOT / "benchmarks" / "overlap.md", monkeypatch)
    report = names["report"]
    assert [event.label for event in report.reductions] == ["bucket 0", "bucket 1", "bucket 2"]
    assert [event.nbytes for event in report.reductions] == [2 * (256 * 256 + 256) * 4] * 3
    assert report.of_reductions.flight_ms >= 3 * (1.0 + 526_336 / 500e3) - 0.01  # three latencies and the bytes
    assert (names["folder"] / "step.png").stat().st_size > 5000
    advice = names["advice"]
    assert names["config"].bucket_size == advice.bucket_size in [each.bucket_size for each in advice.curve]
    assert min(each.exposed_ms for each in advice.curve) == advice.exposed_ms


def test_the_worked_example_is_what_the_report_prints() -> None:
    first = CollectiveEvent("bucket 0", 2**20, 1e-3, 7e-3, 8e-3, 10e-3, 10e-3)
    second = CollectiveEvent("bucket 1", 2**20, 5e-3, None, 12e-3, 10e-3, 12e-3, end_is_exact=True)
    third = CollectiveEvent("bucket 2", 2**20, 9e-3, None, 15e-3, 12e-3, 15e-3, end_is_exact=True)
    assert OverlapReport((first, second, third)).table() in (ROOT / "benchmarks" / "overlap.md").read_text()

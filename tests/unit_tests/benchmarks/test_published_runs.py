"""Plans lie where the page says next to the figures that others have published."""

from pathlib import Path

import pytest

from benchmarks.published_runs import ROWS, PublishedRun, compared

PAGE = Path(__file__).parents[3] / "benchmarks" / "plans.md"


@pytest.mark.in_suite(4)
@pytest.mark.parametrize("run", ROWS, ids=lambda run: run.name)
def test_a_plan_takes_as_long_as_a_published_run(run: PublishedRun) -> None:
    """Within the range that is claimed of the row; and the page has the ratios, those outside of a range too."""
    found = compared(run)
    if run.within is not None:
        least, most = run.within
        assert least <= found["time_ratio"] <= most
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {run.name} |"))
    memory, time = (cell.strip() for cell in line.split("|")[-3:-1])
    assert float(time) == pytest.approx(found["time_ratio"], abs=0.03)
    if found["memory_ratio"] is not None:
        assert float(memory) == pytest.approx(found["memory_ratio"], abs=0.03)

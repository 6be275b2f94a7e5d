"""The command on loops over DeepSpeed's engine: right ones silent, wrong ones found."""

from __future__ import annotations

import pytest

from benchmarks.right_deepspeed import RIGHT, WRONG, Zero, report_of
from tests.unit_tests.ranks import ranks

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.nightly


@ranks(2)
@pytest.mark.parametrize("program", RIGHT, ids=str)
def test_a_right_loop_gives_no_alarm(rank: int, world: int, program: Zero) -> None:
    report = report_of(program)
    assert report.ok and report.parameters == 8 and "those of one process" in report.weights, str(report)


@ranks(2)
@pytest.mark.parametrize("program", WRONG, ids=str)
def test_a_wrong_loop_is_found_and_placed(rank: int, world: int, program: Zero) -> None:
    report = report_of(program)
    assert not report.ok and WRONG[program] in str(report), str(report)

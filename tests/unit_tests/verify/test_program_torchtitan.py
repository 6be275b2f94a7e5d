"""The command on short trainers over torchtitan's parallelize functions: right ones silent, wrong ones found."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.right_torchtitan import RIGHT, RIGHT_OF_4, WRONG, Titan, report_of
from tests.unit_tests.ranks import ranks

is_absent = importlib.util.find_spec("torchtitan") is None  # an import needs triton, which the trainer leaves out
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(is_absent, reason="torchtitan is not installed")]


@ranks(2)
@pytest.mark.parametrize("program", RIGHT, ids=str)
def test_a_right_loop_gives_no_alarm(rank: int, world: int, program: Titan) -> None:
    report = report_of(program)
    assert report.ok and report.parameters == 21 and "those of one process" in report.weights, str(report)


@ranks(4)
@pytest.mark.parametrize("program", RIGHT_OF_4, ids=str)
def test_a_right_loop_of_two_axes_gives_no_alarm(rank: int, world: int, program: Titan) -> None:
    report = report_of(program)
    assert report.ok and report.parameters == 21 and "those of one process" in report.weights, str(report)


@ranks(2)
@pytest.mark.parametrize("program", WRONG, ids=str)
def test_a_wrong_loop_is_found_and_placed(rank: int, world: int, program: Titan) -> None:
    report = report_of(program)
    assert not report.ok and WRONG[program] in str(report), str(report)

"""Thirty mistakes that no check was built for: what finds each, and that nothing blames its right twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from core import parallel_state
from core.verify.report import GradientReport
from tests.unit_tests.distributed.guard.loops import report_of as watched
from tests.unit_tests.ranks import ranks
from tests.unit_tests.verify.planted import ALSO, ALSO_STEPS, PLANTED
from tests.unit_tests.verify.test_also_seen import report_of

Program = Callable[[], Iterator[None]]


def found_by(program: Program) -> str:
    if watched(program()) is not None:
        return "watch"
    reports: dict[str, GradientReport] = {}
    for steps, what in ((None, "command"), (3, "--steps")):
        try:
            reports[what] = report_of(program(), steps=steps)
        except ValueError as error:  # the ranks' microbatches cannot be compared
            print(what, error)
            return what
        if not reports[what].ok:
            return what
    notes = [bool(report.notes) for report in reports.values()]
    return ALSO if notes[0] else ALSO_STEPS if notes[1] else "nothing"


@ranks(2)
@pytest.mark.in_suite(8)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found_and_its_right_twin_is_not_blamed(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel()
    planted = PLANTED[name]
    assert found_by(planted.right) in ("nothing", ALSO_STEPS), "the right twin"
    assert found_by(planted.mistake) == planted.found

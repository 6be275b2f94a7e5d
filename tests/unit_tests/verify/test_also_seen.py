"""`python -m core verify` lists findings that are right in some programs and mistakes in others."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from core import parallel_state
from core.verify.norms import wrong_norm
from core.verify.program import Asked, ProgramWatch
from core.verify.report import GradientReport
from tests.unit_tests.ranks import ranks
from tests.unit_tests.verify import unmeant_programs
from tests.unit_tests.verify.unmeant_programs import UNMEANT, parts_of_two_batches, regression, train

LOSS = f"{unmeant_programs.__name__}:squares"


def report_of(program: Iterator[None], **asked: str) -> GradientReport:
    """Run a program under the command's watch; the last report."""
    watch = ProgramWatch(Asked("a program", **{"loss": LOSS, **asked}))
    with watch.active():
        try:
            for _ in program:
                pass
        except SystemExit:
            pass
        watch.show_the_rest()
    return watch.reports[-1]


@ranks(2)
@pytest.mark.parametrize("name", UNMEANT)
def test_the_command_names_a_mistake_that_all_ranks_share(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel()
    program, text, is_right = UNMEANT[name]
    report = report_of(program(), **({"loss": None} if "column" in name else {}))
    assert re.search(text, str(report).replace("\n", " ")), str(report)
    assert report.ok == is_right, str(report)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_of_a_plain_loop_nothing_else_is_seen(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    if strategy == "no_shard":
        report = report_of(train())
        assert report.ok and not report.notes, str(report)
    for loss in (lambda out, y: (out - y[:, None]).pow(2).mean(), lambda out, y: (out - 1.0).pow(2).mean()):
        report = report_of(regression(loss), loss=None)
        assert report.ok and not report.notes, str(report)


@ranks(2)
def test_parts_of_two_batches_over_context_parallelism_are_named(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    report = report_of(parts_of_two_batches())
    assert "ranks 0 and 1 hold parts of a sequence that were cut from different batches" in str(report)


def test_a_wrong_norm_names_what_it_counts_too_often_or_leaves_out() -> None:
    """Squares of two ranks: 'a' is split, 'b' counts on rank 0; the right norm is 5."""
    squares = {0: {"layers.*.a": 4.0, "layers.*.b": 12.0}, 1: {"layers.*.a": 9.0}}
    assert wrong_norm(5.0, squares) == ""
    for square, words in (
        (16.0, "of 'layers.*.a' only the part of rank 0 counts"),
        (13.0, "'layers.*.b' is left out"),
        (49.0, "'layers.*.b' counts 3 times"),
        (50.0, "'layers.*' counts 2 times"),
    ):
        assert wrong_norm(square**0.5, squares).endswith(f"have 5: {words}")
    assert wrong_norm(5.5, squares).endswith("which are right, have 5")

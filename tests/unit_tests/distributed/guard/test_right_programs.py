"""Right programs of the kinds people write run to the end without an error and without a warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from core import parallel_state
from tests.unit_tests.distributed.guard.right_programs import NAMED
from tests.unit_tests.distributed.guard.right_programs_more import OVER_STAGES, OVER_TENSOR, OWN
from tests.unit_tests.ranks import ranks


def run_in_silence(program: Iterator[None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert sum(1 for _ in program) >= 4, "steps"


@ranks(2)
@pytest.mark.parametrize("name", NAMED)
def test_a_right_program_runs_in_silence(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel()
    run_in_silence(NAMED[name]())


@ranks(2)
@pytest.mark.parametrize("name", OWN)
def test_another_right_program_runs_in_silence(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel()
    run_in_silence(OWN[name]())


@ranks(2)
@pytest.mark.parametrize("name", OVER_TENSOR)
def test_a_right_program_over_tensor_parallelism_runs_in_silence(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    run_in_silence(OVER_TENSOR[name]())


@ranks(2)
@pytest.mark.parametrize("name", OVER_STAGES)
def test_a_right_pipeline_runs_in_silence(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    run_in_silence(OVER_STAGES[name]())

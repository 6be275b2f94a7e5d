"""Random modules, trained in random ways: ours is plain torch on one process, or is refused by name on all ranks.

A failing case is described with its seed. To run it again:

    python -m tests.unit_tests.distributed.test_training_habits WORLD SEED [SEED ...]
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from core import parallel_state
from core.distributed import SyncError
from tests.unit_tests.distributed import habit_sides
from tests.unit_tests.distributed.habit_cases import (
    ADAPTERS,
    ALGORITHMS,
    BACKWARDS,
    EDITS,
    READS,
    STRATEGIES,
    WEIGHT_EDITS,
    ZEROS,
    Case,
    draw,
)
from tests.unit_tests.distributed.habit_models import PARTS
from tests.unit_tests.distributed.habit_sides import CASE_LIMIT_S, Ours, outcome, outcomes, run_cases
from tests.unit_tests.rank_codes import MUTATIONS, mutate_reductions
from tests.unit_tests.ranks import RankFailure, ranks, run_on_ranks

MANY = 25  # cases that are run one after another on the same ranks


def check(world: int, seeds: Sequence[int], folder: Path) -> None:
    """Run the cases of these seeds; a rank that does not end is told with its case."""
    arguments = {"world": world, "seeds": list(seeds), "folder": str(folder)}
    try:
        run_on_ranks(run_cases, world, arguments, timeout_s=CASE_LIMIT_S + 2.0 * len(seeds))
    except RankFailure as failure:
        cases = "\n\n".join(f"{path.name} was in {path.read_text()}" for path in sorted(folder.glob("rank-*")))
        raise AssertionError(f"{failure}\n\n{cases}") from None


@pytest.mark.parametrize(
    ("world", "first", "count"), [(1, 0, 40), (2, 100, 20), pytest.param(3, 250, 12, marks=pytest.mark.nightly)]
)
@pytest.mark.in_suite(1)
def test_random_training_habits_are_those_of_plain_torch_or_refused(
    world: int, first: int, count: int, tmp_path: Path
) -> None:
    check(world, range(first, first + count), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("world", "first"),
    [(world, 10_000 * world + MANY * n) for world, many in ((1, 24), (2, 32), (3, 10)) for n in range(many)],
)
def test_many_random_training_habits(world: int, first: int, tmp_path: Path) -> None:
    check(world, range(first, first + MANY), tmp_path)


def test_every_habit_is_drawn() -> None:
    cases = [draw(seed, 2) for seed in range(3000)]
    drawn = {name for case in cases for name in (*case.habits, *case.parts, case.strategy, case.algorithm)}
    everything = {*BACKWARDS, *EDITS, *WEIGHT_EDITS, *READS, *ZEROS, *ADAPTERS, *PARTS, *STRATEGIES, *ALGORITHMS}
    assert everything == drawn, "habits that no case has"
    assert all(any(refusal.applies(case) for case in cases) for refusal in habit_sides.REFUSALS)


def test_a_seed_gives_the_same_case_wherever_it_is_drawn() -> None:
    assert draw(17, 2) == draw(17, 2)
    assert len({str(draw(seed, 2)) for seed in range(50)}) == 50


# -- the test of the tests --------------------------------------------------------------------------------------------


def one_case_of_each_strategy(world: int, fits: Callable[[Case], bool]) -> list[Case]:
    """The first that fits, for every strategy."""
    return [
        next(case for case in (draw(seed, world) for seed in itertools.count()) if case.strategy == name and fits(case))
        for name in STRATEGIES
    ]


def plainly(case: Case) -> bool:
    """Nothing is refused, and no change of the weights covers what a step did before."""
    return not any(refusal.applies(case) for refusal in habit_sides.REFUSALS) and not any(case.weight_edits)


@ranks(2)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_reduction_that_is_spoilt_turns_every_strategy_red(rank: int, world: int, mutation: str) -> None:
    parallel_state.initialize_model_parallel()
    for case in one_case_of_each_strategy(world, lambda case: plainly(case) and case.uses_all and not case.clip):
        with mutate_reductions("dp_cp", mutation) as hits:
            text = outcome(case, rank)
        assert hits and text.startswith("wrong: "), f"{case}\n{text}"


@contextmanager
def only_the_last_microbatch() -> Iterator[None]:
    backward = Ours.backward

    def spoilt(self: Ours, loss: torch.Tensor) -> None:
        if self.booster is None:
            self.model.zero_grad_buffer()
        else:
            self.optimizer.zero_grad()
        backward(self, loss)

    with mock.patch.object(Ours, "backward", spoilt):
        yield


@contextmanager
def another_rate() -> Iterator[None]:
    with mock.patch.object(Ours, "change_lr", lambda self, factor: None):
        yield


@contextmanager
def a_fresh_optimizer() -> Iterator[None]:
    def spoilt(self: Ours) -> None:
        self.optimizer = self.new_optimizer()

    with mock.patch.object(Ours, "restart", spoilt):
        yield


@contextmanager
def no_clipping() -> Iterator[None]:
    with mock.patch("core.optimizer.optimizer.clip_coefficient", lambda limit, norm: 1.0):
        yield


@contextmanager
def a_change_that_is_lost() -> Iterator[None]:
    with mock.patch.object(Ours, "load", lambda self, state: None):
        yield


SPOILT: dict[str, tuple[Callable[[], AbstractContextManager[None]], Callable[[Case], bool]]] = {
    "only the last microbatch counts": (
        only_the_last_microbatch,
        lambda case: plainly(case) and "microbatches without no_sync" in case.backwards,
    ),
    "the rate is not changed": (another_rate, lambda case: plainly(case) and case.changes_lr),
    "the state of the optimizer is lost": (
        a_fresh_optimizer,
        lambda case: plainly(case) and case.saves and case.algorithm == "Adagrad",
    ),
    "gradients are not clipped": (
        no_clipping,
        lambda case: plainly(case) and case.clip > 0 and case.algorithm == "SGD" and case.steps_by == "ours",
    ),
    "loaded weights are lost": (
        a_change_that_is_lost,
        lambda case: case.weight_edits[2:] == ("load the wrapper", None),
    ),
}


@ranks(2)
def test_a_training_that_is_spoilt_turns_red(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for name, (spoil, fits) in SPOILT.items():
        case = next(case for case in (draw(seed, world) for seed in itertools.count()) if fits(case))
        assert outcome(case, rank) == "equal", f"{name}: {case}"
        with spoil():
            text = outcome(case, rank)
        assert text.startswith("wrong: "), f"{name}: {case}\n{text}"


@ranks(2)
def test_a_refusal_that_no_table_lists_or_that_only_one_rank_makes_is_wrong(
    rank: int, world: int, tmp_path: Path
) -> None:
    train = habit_sides.our_training
    equal, unlisted, alone = [seed for seed in range(100) if plainly(draw(seed, world))][:3]

    def refuse(case: Case, number: int) -> Ours:
        ours = train(case, number)
        if case.seed == unlisted:
            raise SyncError("nobody knows why")
        if case.seed == alone and number == 1:
            raise SyncError("listed")
        return ours

    table = (habit_sides.Refusal("anything", lambda case: True, "listed"),)
    with mock.patch.object(habit_sides, "our_training", refuse), mock.patch.object(habit_sides, "REFUSALS", table):
        found = [text for _, text in outcomes(rank, world, [equal, unlisted, alone], str(tmp_path))]
    assert not found[0]
    assert "rank 0: wrong" in found[1] and "nobody knows why" in found[1]
    assert "rank 1: refused: SyncError: listed" in found[2] and f"seed {alone} at 2 ranks" in found[2]


if __name__ == "__main__":
    arguments: list[Any] = [int(argument) for argument in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments[1:]:
            print(draw(seed, arguments[0]))
        check(arguments[0], arguments[1:], Path(folder))
    print("equal, or refused as the table allows")

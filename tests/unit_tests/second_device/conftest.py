"""Ranks that have the second device, for the tests of this folder."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from core.verify.rank_pool import RankPool
from tests.unit_tests.second_device import device as second

Runner = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Call a function with the second device on each of some ranks. The call returns the result of rank 0."""
    yield from _runner(tmp_path_factory, 2)


@pytest.fixture(scope="module")
def run_on_four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Do the same with four ranks."""
    yield from _runner(tmp_path_factory, 4)


def _runner(tmp_path_factory: pytest.TempPathFactory, ranks: int) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("second")
    built = second.build(tmp_path_factory.getbasetemp().parent)
    count = itertools.count()
    with RankPool(ranks) as pool:

        def call(function: Callable[..., Any], world: int, *arguments: Any) -> Any:
            store = folder / f"store-{next(count)}"
            return pool.run(second.on_second_device, world, (built, store, function, *arguments), limit_s=300)

        yield call

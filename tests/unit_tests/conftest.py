"""One thread a process, no rank left behind, and which cases of a test with many are left to `make nightly`."""

import gc
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs a network; a name that is nowhere would be asked for again

from tests.unit_tests import poison, ranks, rewritten


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """As tmp_path, where an fsync costs nothing: for many saves by processes that are killed, not for a power cut."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="pytest-", dir=memory) as folder:
        yield Path(folder)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--poison", action="store_true", help="fill memory with NaN until it is written")
    parser.addoption("--quick", action="store_true", help="run one case of each test that needs at most two ranks")


@pytest.fixture(autouse=True)
def poisoned() -> None:
    if poison.is_on():
        poison.start()


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """Groups belong to ranks; one that a test leaves in this process makes others fail."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test has left a process group in pytest's own process")


def pytest_configure(config: pytest.Config) -> None:
    """Rewrite the asserts of a run's files once for all of its processes, each worker of xdist a part of them."""
    if config.getoption("--poison", False):
        os.environ[poison.VARIABLE] = "1"
    worker = getattr(config, "workerinput", None)
    if worker is not None and rewritten.FOLDER in os.environ:
        rewritten.share(Path(os.environ[rewritten.FOLDER]))
        number = int(worker["workerid"].removeprefix("gw"))
        rewritten.rewrite_a_part(config.args, number, worker["workercount"], config)
    elif worker is None and config.getoption("numprocesses", None):
        os.environ[rewritten.FOLDER] = tempfile.mkdtemp(prefix="rewritten-")


def pytest_collection_finish() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # a whole suite, or much of it
        ranks.start_server()
        gc.freeze()  # what was imported and collected stays, so no later collection need look at it: 0.5 s each


def pytest_unconfigure(config: pytest.Config) -> None:
    ranks.close_pool()
    if not hasattr(config, "workerinput") and rewritten.FOLDER in os.environ:
        shutil.rmtree(os.environ.pop(rewritten.FOLDER), ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is marked `in_suite`, mark the cases that are not chosen as nightly."""
    if config.getoption("--quick", False):
        first: dict[str, pytest.Item] = {}
        for item in items:
            if item.get_closest_marker("nightly") is None and _world(item) <= 2:
                first.setdefault(item.nodeid.split("[")[0], item)
        config.hook.pytest_deselected(items=[item for item in items if item not in first.values()])
        items[:] = first.values()
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("in_suite") is not None and item.get_closest_marker("nightly") is None:
            assert isinstance(item, pytest.Function)
            tests[item.nodeid.split("[")[0]].append(item)
    for cases in tests.values():
        (mark,) = cases[0].iter_markers("in_suite")
        chosen = _spread(cases, *mark.args) if mark.args else _each_value(cases)
        for case in cases:
            if case not in chosen:
                case.add_marker("nightly")


def _world(item: pytest.Item) -> int:
    return item.callspec.params.get("world", 1) if hasattr(item, "callspec") else 1


def _spread(cases: list[pytest.Function], count: int) -> list[pytest.Function]:
    return [cases[number * len(cases) // count] for number in range(count)]


def _each_value(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Few cases in which each value of each parameter occurs; greedy, the same ones at every call."""
    values = [{(name, repr(value)) for name, value in case.callspec.params.items()} for case in cases]
    missing, chosen = set[tuple[str, str]]().union(*values), []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(values[number] & missing))
        chosen.append(cases[best])
        missing -= values[best]
    return chosen

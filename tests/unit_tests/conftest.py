"""One thread a process, and no rank left behind."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.unit_tests import ranks


def pytest_unconfigure() -> None:
    ranks.close_pool()

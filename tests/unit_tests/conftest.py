"""One thread a process, and no rank left behind."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs a network; a name that is nowhere would be asked for again

from tests.unit_tests import ranks


def pytest_unconfigure() -> None:
    ranks.close_pool()

"""Workers of a DataLoader hold no connections of their rank: when it is killed, the others notice at once."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from core import parallel_state
from tests.unit_tests import ranks as pool
from tests.unit_tests.ranks import ranks

SLOW_S = 40.0
linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")


class Numbers(Dataset[int]):
    """Two numbers come at once, the third after a long time."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index >= 2:
            time.sleep(SLOW_S)
        return index


def inodes(pid: int | str, families: tuple[str, ...] = ("tcp", "tcp6")) -> set[str]:
    """The network sockets that a process has open."""
    rows = [line.split() for name in families for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    of_network = {row[9] for row in rows}
    found = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{entry}")
        except FileNotFoundError:  # the listing's own
            continue
        if link.startswith("socket:[") and link[8:-1] in of_network:
            found.add(link[8:-1])
    return found


@linux
@ranks(2)
def test_a_worker_holds_no_connection_of_its_rank_but_those_that_python_knows(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    with socket.create_server(("127.0.0.1", 0)) as mine:
        inode = os.readlink(f"/proc/self/fd/{mine.fileno()}")[8:-1]
        loader = iter(DataLoader([0, 1, 2, 3], num_workers=2, prefetch_factor=1, multiprocessing_context="fork"))
        assert next(loader) == torch.tensor([0])
        assert len(inodes("self")) > 2, "gloo's and the store's"
        for worker in loader._workers:  # type: ignore[attr-defined]
            assert inodes(worker.pid) & inodes("self") == {inode}
        assert len(list(loader)) == 3
    dist.barrier()


def _train(rank: int, folder: str, workers: int) -> None:
    """Two ranks that take data and meet; rank 1 stops at a step and is killed there."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel()
    context = "fork" if workers else None
    items = iter(DataLoader(Numbers(), num_workers=workers, multiprocessing_context=context))
    for _ in range(2):
        next(items)
        dist.all_reduce(torch.ones(4))
    Path(folder, f"there{rank}").touch()
    if rank == 1:
        time.sleep(SLOW_S)  # and its workers sleep too
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError:
        Path(folder, "noticed").touch()
    os._exit(0)


@linux
@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_killed_rank_with_workers_is_noticed_as_fast_as_one_without(tmp_path: Path, workers: int) -> None:
    context: Any = pool._the_pool().context
    job = [context.Process(target=_train, args=(rank, str(tmp_path), workers)) for rank in range(2)]
    for process in job:
        process.start()
    try:
        until = time.monotonic() + 60
        while not all((tmp_path / f"there{rank}").exists() for rank in range(2)) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(job[1].pid, signal.SIGKILL)
        job[0].join(3.0)
        assert (tmp_path / "noticed").exists()
    finally:
        for process in job:
            process.kill()
            process.join()

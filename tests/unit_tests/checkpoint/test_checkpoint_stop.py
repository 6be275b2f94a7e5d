"""SIGTERM on any rank: all ranks agree at one step edge, save there, and end with status 0."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from core.checkpoint.agreement import Ranks
from core.checkpoint.directory import find_intact
from core.checkpoint.saver import CheckpointSaver
from core.checkpoint.stop_signal import StopSignal
from tests.unit_tests import ranks as pool
from tests.unit_tests.checkpoint.checkpoint_saves import assert_is_step, loaded, save_alone, save_step
from tests.unit_tests.ranks import ranks

WORLD = 2


@ranks(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_ranks_agree_in_the_same_step_and_know_why(rank: int, world: int, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stopped_at = None
    with StopSignal() as stop:
        for step in range(1, 8):
            if step == 4 and rank == 2:
                os.kill(os.getpid(), number)
            if stop.agreed():
                stopped_at = step
                break
        assert stop.agreed() and stop.agreed(), "no collective any more"
        assert stop.reason == f"rank 2 got {number.name}"
        assert (stop.requested == number) if rank == 2 else (stop.requested is None)
    assert Ranks().gather(stopped_at) == [4] * world
    assert signal.getsignal(number) == before


@ranks(2)
def test_without_a_signal_nothing_stops(rank: int, world: int) -> None:
    with StopSignal() as stop:
        assert [stop.agreed() for _ in range(3)] == [False] * 3
        assert stop.reason is None


def test_one_ctrl_c_that_is_delivered_twice_is_a_request() -> None:
    with StopSignal() as stop:
        for _ in range(2):  # by a launcher and by the terminal
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested is signal.SIGINT


def test_a_second_ctrl_c_interrupts_and_a_second_sigterm_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.checkpoint.stop_signal.SAME_PRESS_S", 0.0)
    with StopSignal() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed() and stop.requested is signal.SIGTERM
        time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_in_a_thread_it_says_that_it_cannot_hear(tmp_path: Path) -> None:
    heard: list[BaseException] = []

    def enter() -> None:
        try:
            with StopSignal():
                pass
        except RuntimeError as error:
            heard.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread only" in str(heard[0])


def _job(rank: int, folder: str) -> None:
    """A job that would run for minutes; it is sent SIGTERM."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    with StopSignal() as stop, CheckpointSaver(Path(folder) / "root", asynchronous=True) as saver:
        for step in range(1, 10_000):
            time.sleep(0.01)
            saver.step_edge()
            (Path(folder) / f"started{rank}").touch()
            if stop.agreed():
                save_step(saver, step)
                break
    dist.destroy_process_group()


@pytest.mark.parametrize("signalled", [[0], [1], [0, 1]])
@pytest.mark.timeout(300)
def test_a_job_that_gets_sigterm_saves_and_ends_with_status_0(signalled: list[int], tmp_path: Path) -> None:
    context: Any = pool._the_pool().context
    job = [context.Process(target=_job, args=(rank, str(tmp_path))) for rank in range(WORLD)]
    for process in job:
        process.start()
    until = time.monotonic() + 120
    while not all((tmp_path / f"started{rank}").exists() for rank in range(WORLD)) and time.monotonic() < until:
        time.sleep(0.02)
    for rank in signalled:
        os.kill(job[rank].pid, signal.SIGTERM)
    for process in job:
        process.join(60)
    assert [process.exitcode for process in job] == [0, 0]
    directory = find_intact(tmp_path / "root", strict=True)
    for rank in range(WORLD):
        assert_is_step(loaded(directory, rank), directory.step, rank)
    save_alone(tmp_path / "root", directory.step + 1)

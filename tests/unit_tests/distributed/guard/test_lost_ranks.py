"""A rank of this host that was killed is named, also where a backend's error is all that tells of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core.distributed import PeerLost, SyncError
from core.watch.waiting import call_of, calling, current_wait, waiting

CLOSED = "Connection closed by peer [127.0.0.1]:1. This is typically caused by a crash."


def fail(error: Exception) -> None:
    with calling("finalize_model_grads", 3), waiting("the reduction of", [0, 1], "bucket 7"):
        raise error


def test_a_backends_error_in_a_wait_says_what_was_waited_for_and_other_errors_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a watch, which could say more."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(PeerLost) as found:
        fail(RuntimeError(CLOSED))
    assert str(found.value) == (
        "rank 0 waited 0.0 s for the reduction of bucket 7 in finalize_model_grads (step 3), ranks 0, 1, which failed "
        "(Connection closed by peer [127.0.0.1]:1). Did a rank get fewer batches than the others, call "
        "state_dict() alone, or leave out a backward, finalize_model_grads or optimizer.step? The output of the rank "
        "that failed first says more; restart from the last checkpoint"
    )
    assert str(found.value.__cause__) == CLOSED
    for error in (SyncError("frozen"), ValueError("connection of the user"), RuntimeError("of the user"), found.value):
        with pytest.raises(type(error)) as raised, waiting("an outer wait", [0, 1]):
            fail(error)
        assert raised.value is error
    assert found.value.wait is not None and str(found.value.wait) == "the reduction of bucket 7"


def test_a_wait_is_over_when_it_has_failed() -> None:
    with contextlib.suppress(ValueError):
        fail(ValueError("of the user"))
    assert current_wait(threading.current_thread()) is None
    assert call_of(vars(threading.current_thread())) == " (step 3)"


def train(rank: int, world: int, folder: str, strategy: str) -> None:
    """Rank 1 is killed between two steps; what the others raise goes into files."""
    from core import parallel_state
    from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel()
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
    model = DistributedDataParallel(None, config, torch.nn.Linear(4, 4))
    begun = time.monotonic()
    try:
        for step in range(2):
            model.zero_grad_buffer()
            model(torch.ones(4)).sum().backward()
            if step == 1 and rank == 1:
                (Path(folder) / "killed").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            finalize_model_grads([model])
    except RuntimeError as error:
        begun = time.monotonic() - begun
        (Path(folder) / f"raised {rank}").write_text(f"{type(error).__name__} {begun < 20}: {error}")
    os._exit(0)


@pytest.mark.parametrize("strategy", ["no_shard", pytest.param("optim_grads", marks=pytest.mark.nightly)])
def test_the_others_say_which_rank_was_killed(strategy: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "core.distributed"])
    job = [context.Process(target=train, args=(rank, 3, str(tmp_path), strategy)) for rank in range(3)]
    for process in job:
        process.start()
    for process in job:
        process.join(60)
    alive = [process for process in job if process.is_alive()]
    for process in alive:
        process.kill()
    assert not alive and [process.exitcode for process in job] == [0, -signal.SIGKILL, 0]
    killed = (tmp_path / "killed").read_text()
    for rank in (0, 2):
        raised = (tmp_path / f"raised {rank}").read_text()
        assert raised.startswith(f"PeerLost True: rank {rank} waited")
        # The other one that raises may have left before this one looks.
        assert re.search(rf"; (found first: )?rank 1 \(process {killed} on ", raised)
        assert "The output of rank 1 says why it ended" in raised and "fewer batches" not in raised

"""A rank of this host that was killed is named, also where a backend's error is all that tells of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core.distributed import SyncError
from core.distributed.guard import lost_ranks
from core.distributed.guard.lost_ranks import naming_lost_ranks
from core.distributed.wire.shared_memory import PeerLost
from tests.unit_tests.distributed.wire.test_shared_memory import channels_of

CLOSED = "Connection closed by peer [127.0.0.1]:1. This is typically caused by a crash."


def fail(error: Exception, pids: list[int]) -> None:
    with naming_lost_ranks("finalize_model_grads", 3, channels_of(3, 8, pids=pids)[0][:1]):
        raise error


def test_a_process_that_has_ended_is_named_and_other_errors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(lost_ranks, "GRACE_S", 0.1)
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    here = os.getpid()
    with pytest.raises(PeerLost) as found:
        fail(RuntimeError(CLOSED), [here, here, ended.pid])
    assert str(found.value).startswith(
        "rank 0 waited in finalize_model_grads (step 3), which failed (Connection closed by peer [127.0.0.1]:1); "
        f"rank 2 (process {ended.pid}) has ended. Did a rank get fewer batches"
    )
    assert str(found.value.__cause__) == CLOSED
    for error in (SyncError("frozen"), ValueError("of the user"), RuntimeError(CLOSED)):
        with pytest.raises(type(error)) as raised:
            fail(error, [here, here, ended.pid if not isinstance(error, RuntimeError | ValueError) else here])
        assert raised.value is error
    with pytest.raises(SyncError) as kept:
        fail(SyncError("frozen"), [here, here, ended.pid])
    assert str(kept.value) == "frozen"
    with naming_lost_ranks("nothing", 1):
        pass


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
        assert raised.startswith(f"PeerLost True: rank {rank} waited") and f"rank 1 (process {killed})" in raised


def leave_out_a_step(rank: int, world: int, folder: str) -> None:
    """Rank 1 leaves out an optimizer.step; what a rank raises goes into a file."""
    from core import parallel_state
    from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel()
    config = DistributedDataParallelConfig(share_host_memory=False)
    model = DistributedDataParallel(None, config, torch.nn.Linear(100, 4))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    try:
        for step in range(2):
            model.zero_grad_buffer()
            model(torch.ones(100)).sum().backward()
            finalize_model_grads([model])
            if step == 1 or rank == 0:
                optimizer.step()
    except RuntimeError as error:
        (Path(folder) / f"raised {rank}").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


@pytest.mark.nightly
def test_a_rank_that_gloo_ends_for_a_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    """The norm of one rank meets the other's next bucket: see "When a rank does not come" in architecture.md."""
    context = multiprocessing.get_context("forkserver")
    job = [context.Process(target=leave_out_a_step, args=(rank, 2, str(tmp_path))) for rank in range(2)]
    for process in job:
        process.start()
    for process in job:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in job] == [-signal.SIGABRT, 0]
    raised = (tmp_path / "raised 1").read_text()
    assert raised.startswith("SyncError: rank 1 waited ") and "in finalize_model_grads (step 2, ranks [0, 1])" in raised
    assert "; rank 0 did not come. Did a rank get fewer batches" in raised

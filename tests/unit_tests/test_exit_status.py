"""A rank that fails exits within seconds with a status that is not 0, in plain processes and under torchrun.

The interpreter joins the threads in which gloo runs collectives, so a rank whose collective never ends would print its
traceback and stay. Each rank is an interpreter here, because a worker of a pool ends without that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.distributed.wire.collectives import Collectives
from core.watch import waiting
from core.watch.waiting import PeerLost
from tests.unit_tests.ranks import ranks

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0  # two interpreters start on a busy machine
BEGIN = """
import atexit, os, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
from core import parallel_state
from core.watch import rank_watch, waiting

waiting.PATIENCE_S, waiting.LOOK_S = 1.0, 0.6
dist.init_process_group("gloo")
atexit.register(print, "handlers of the program ran")
parallel_state.initialize_model_parallel()
rank = dist.get_rank()
dist.barrier()
"""
SAVE = (
    BEGIN
    + """
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.integrations import LoopOptimizer

config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads", share_host_memory=False)
torch.manual_seed(0)
model = DistributedDataParallel(None, config, nn.Linear(4, 4))
optimizer = LoopOptimizer(model, torch.optim.AdamW(model.parameters()))
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
    finalize_model_grads([model])
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        torch.save(optimizer.state_dict(), os.devnull)
"""
)
# Rank 0 fails while its own collective is in flight, to which rank 1 does not come.
IN_FLIGHT = (
    BEGIN
    + """
if rank == 0:
    rank_watch.LEAVE_S = 3.0
    work = dist.all_reduce(torch.ones(4), async_op=True)
    raise ValueError("a bad batch")
with waiting.waiting("the others", dist.group.WORLD):
    work = dist.all_to_all_single(torch.empty(4), torch.ones(4), async_op=True)
    waiting.complete(work)
"""
)
# Rank 0 catches the error of its wait, and exits by itself.
CAUGHT = (
    BEGIN
    + """
from core.groups import agree

if rank == 0:
    try:
        agree.gather("here", None, "the place")
    except RuntimeError as error:
        print(error)
        sys.exit(3)
with waiting.waiting("the others", dist.group.WORLD):
    work = dist.all_to_all_single(torch.empty(4), torch.ones(4), async_op=True)
    waiting.complete(work)
"""
)
RIGHT = (
    BEGIN
    + """
threading.Thread(target=lambda: 1 / 0).start()  # a thread's own error ends the thread
sys.last_value = ValueError("caught by a notebook or by pytest")
dist.barrier()
print("the end")
"""
)


@pytest.fixture
def environments() -> Iterator[list[dict[str, str]]]:
    """Environments of two ranks without a launcher."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ours = {**os.environ, **agent, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    yield [{**ours, "RANK": str(rank)} for rank in range(2)]


def run_plain(program: Path, environments: list[dict[str, str]]) -> list[tuple[int, str]]:
    """(exit status, output) of each rank; the status of one that has to be killed is -9."""
    command = [sys.executable, str(program)]
    job = [
        subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for env in environments
    ]
    until = time.monotonic() + LIMIT_S
    said = []
    for process in job:
        try:
            text, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        said.append((process.returncode, text))
    return said


@pytest.mark.parametrize(
    ("program", "statuses", "words"),
    [
        (SAVE, [1, 1], ["its state_dict() is collective: call it on all of them", "the state of a sharded optimizer"]),
        (IN_FLIGHT, [1, 1], ["ValueError: a bad batch", "failed: ValueError: a bad batch"]),
        (CAUGHT, [3, 1], ["waited", "waited"]),
        (RIGHT, [0, 0], ["the end", "the end"]),
    ],
    ids=["state_dict on one rank", "a collective in flight", "caught", "errors that end nothing"],
)
def test_a_rank_that_fails_exits_within_seconds(
    tmp_path: Path, environments: list[dict[str, str]], program: str, statuses: list[int], words: list[str]
) -> None:
    path = tmp_path / "program.py"
    path.write_text(program)
    found = run_plain(path, environments)
    assert [status for status, _ in found] == statuses, "\n".join(text for _, text in found)
    for (status, text), expected in zip(found, words, strict=True):
        assert expected in text, text
        assert status not in (0, 3) or "handlers of the program ran" in text


def test_torchrun_ends_a_job_whose_rank_saves_a_sharded_optimizer_alone(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(SAVE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, str(path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 1
    assert "its state_dict() is collective: call it on all of them" in ended.stderr


@ranks(2)
def test_a_rank_that_has_left_is_not_waited_for(rank: int, world: int, tmp_path: Path) -> None:
    """Its process lives on, as a notebook's does, so no connection closes."""
    parallel_state.initialize_model_parallel()
    dist.barrier(group=parallel_state.get_data_parallel_group())
    if rank == 1:
        held = parallel_state.get_process_groups()  # its connections stay
        parallel_state._state.groups = None
        parallel_state.destroy_model_parallel()
        until = time.monotonic() + 40
        while not (tmp_path / "done").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert held.dp_cp is not None
        return
    patience, look = waiting.PATIENCE_S, waiting.LOOK_S
    waiting.PATIENCE_S, waiting.LOOK_S = 1.0, 0.6
    try:
        with pytest.raises(PeerLost, match=r"rank 1 left before\); rank 1 \(process .* has left without an error"):
            Collectives().all_reduce(torch.ones(3), parallel_state.get_data_parallel_group(), "ones").wait()
    finally:
        waiting.PATIENCE_S, waiting.LOOK_S = patience, look
        (tmp_path / "done").touch()

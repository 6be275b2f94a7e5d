"""Waits for other ranks: Ctrl-C is heard in them, and a start that fails names the ranks that did not come."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from core import parallel_state
from core.booster import DistCoordinator
from core.booster.launch import launch
from core.booster.process_group_mesh import ProcessGroupMesh
from core.checkpoint import load_checkpoint, save_checkpoint
from core.context_parallel.ring import pass_on
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.distributed.wire.backend import new_communicator
from core.distributed.wire.collectives import Collectives
from core.groups import agree
from core.groups.local_store import local_store
from core.moe.exchange import all_to_all_rows
from core.pipeline_parallel import plan_pipeline
from core.pipeline_parallel.forward_only import forward_only
from core.tensor_parallel import broadcast_data, mappings
from core.watch.signals import STAYS_S
from core.watch.waiting import PeerLost, current_wait, own_failure, starting, use_watch, waiting
from core_compat.megatron.faces.clip_grads import count_zeros_fp32, get_grad_norm_fp32
from core_compat.megatron.faces.hyper_comm_grid import new_groups
from core_compat.megatron.faces.timers import Timer
from core_train.trainer import Trainer
from tests.unit_tests.pipeline_parallel.pipeline_reference import microbatch, start_pipeline
from tests.unit_tests.ranks import ranks

SOON_S = STAYS_S + 5.0  # below a second at rest; a wait that is not ended lasts as long as the other rank is late


def all_reduce_of_ones() -> Tensor:
    return mappings.all_reduce(torch.ones(3), parallel_state.get_tensor_model_parallel_group())


WAITS: dict[str, Callable[[], Any]] = {
    "a reduction of gradients": lambda: Collectives().all_reduce(torch.ones(3), dist.group.WORLD, "ones").wait(),  # type: ignore[arg-type]
    "layers of a split model": all_reduce_of_ones,
    "the ring of a sequence": lambda: pass_on(torch.ones(3), dist.group.WORLD).wait(),  # type: ignore[arg-type]
    "rows of experts": lambda: all_to_all_rows(torch.ones(2, 1), [1, 1], [1, 1], dist.group.WORLD),
    "an agreement": lambda: agree.gather(1, None, "one"),
    "a receive of the user": lambda: dist.recv(torch.ones(3), 1),
    "a barrier in another group": lambda: dist.barrier(group=parallel_state.get_tensor_model_parallel_group()),
}


def interrupted(call: Callable[[], Any], done: Path) -> float:
    """Seconds from a Ctrl-C to its KeyboardInterrupt in a call. done: what the late rank waits for."""
    began = time.monotonic()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            call()
    finally:
        done.touch()
    assert current_wait(threading.current_thread()) is None
    assert own_failure(raised.value) == "KeyboardInterrupt: ", "the other ranks hear why this one has left"
    return time.monotonic() - began - 0.3


@ranks(2)
@pytest.mark.parametrize("what", WAITS)
def test_ctrl_c_comes_soon_while_another_rank_is_late(rank: int, world: int, what: str, tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    dist.barrier()  # gloo connects two ranks when both want it, and such a wait is not ended
    if what != "a receive of the user":
        WAITS[what]()  # with what is imported in it
    if rank == 0:
        assert interrupted(WAITS[what], tmp_path / "done") < SOON_S
    while not (tmp_path / "done").exists():
        time.sleep(0.02)


@ranks(2)
def test_ctrl_c_comes_soon_in_a_pipeline(rank: int, world: int, tmp_path: Path) -> None:
    """The first stage waits for gradients that the last one is late with."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runner = start_pipeline(plan_pipeline(4, 2), "1F1B")
    inner = runner.forward_step

    def late(*given: Any) -> Any:
        while rank == 1 and not (tmp_path / "done").exists():
            time.sleep(0.02)
        return inner(*given)

    runner.forward_step = late
    step = lambda: runner.step([microbatch(0, number) for number in range(2)])  # noqa: E731
    if rank == 0:
        assert interrupted(step, tmp_path / "done") < SOON_S
    else:
        with pytest.raises(PeerLost):
            step()


@ranks(2)
def test_a_handler_of_the_users_own_keeps_its_wait(rank: int, world: int, tmp_path: Path) -> None:
    """Who notes a Ctrl-C, to stop at the end of a step, still gets the sum."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    if rank == 0:
        heard: list[int] = []
        signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert all_reduce_of_ones().tolist() == [2.0] * 3
        assert heard == [signal.SIGINT]
    else:
        time.sleep(STAYS_S + 0.5)
        all_reduce_of_ones()


def test_a_rank_that_does_not_come_to_the_start_is_named() -> None:
    store = local_store()
    words = r"rank 0 waited for all 3 ranks to start, and rank 2 did not come \(none\)"
    with pytest.raises(PeerLost, match=words), starting(store, 0, 3):
        store.set("came/1", "")
        raise dist.DistStoreError("none")


class Ended:
    """A watch that has found that rank 1 has ended."""

    lost = {1: "it has ended"}  # noqa: RUF012

    def account(self, wait: waiting) -> tuple[str, str]:
        return "; rank 1 has ended", ""

    def deadlocked_beats(self, patience_s: float) -> dict[int, int]:
        return {}


def closed(*given: Any, **options: Any) -> None:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")


@ranks(1)
def test_waits_of_saves_loops_and_groups_name_the_lost_rank(rank: int, world: int, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), torch.nn.Linear(2, 2))
    save_checkpoint(tmp_path, 1, [model])
    use_watch(Ended())
    stage = plan_pipeline(4, 2)
    sends = {0: lambda number, inputs: torch.ones(2)}
    alone = ProcessGroupMesh(1)
    for owner, name, what, act in (
        (dcp, "save", "the other ranks' part of a save", lambda: save_checkpoint(tmp_path, 2, [model])),
        (dcp, "load", "the other ranks' part of a load", lambda: load_checkpoint(tmp_path, [model])),
        (dist, "all_reduce", "the mean loss", lambda: Trainer._mean_over_ranks(None, torch.ones(()), 1, False)),  # type: ignore[arg-type]
        (dist, "barrier", "block_all", DistCoordinator().block_all),
        (dist, "barrier", "a timer's barrier", lambda: Timer("step").start(barrier=True)),
        (dist, "all_reduce", "the gradients' norm", lambda: get_grad_norm_fp32(torch.ones(2))),
        (dist, "all_reduce", "the number of zeros", lambda: count_zeros_fp32([], None)),
        (dist, "new_group", "a group of the caller's own", parallel_state.create_group),
        (dist, "new_group", r"a group of ranks \[0\]", lambda: new_groups([[0]])),
        (dist, "new_group", r"a group of ranks \[0\]", lambda: alone.create_group_along_axis(0)),
        (dist, "new_group", "another communicator", lambda: new_communicator(dist.group.WORLD)),  # type: ignore[arg-type]
        (
            dist,
            "send",
            "the next stage to take the activations",
            lambda: forward_only(
                stage,
                sends,
                1,
                lambda _: [torch.ones(2, device="meta")],
                dist.group.WORLD,
                torch.device("cpu"),  # type: ignore[arg-type]
            ),
        ),
    ):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(owner, name, closed)
            monkeypatch.setattr(dist, "get_global_rank", lambda _group, place: place)
            with pytest.raises(PeerLost, match=f"waited .* for {what}.*Connection closed.*; rank 1 has ended"):
                act()


@ranks(2)
def test_data_of_the_first_rank_names_the_lost_rank(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    use_watch(Ended())
    words = r"for the data of the first rank.*, ranks 0, 1,.*; rank 1 has ended"
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(PeerLost, match=words):
        monkeypatch.setattr(dist, "broadcast", closed)
        broadcast_data(["x"], {"x": torch.ones(2)}, torch.float32)


def test_a_launch_to_which_a_rank_does_not_come_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*given: Any, **options: Any) -> None:
        raise dist.DistStoreError("wait timeout after 1800000ms")

    monkeypatch.setattr(dist, "init_process_group", none)
    store = local_store()
    with pytest.raises(PeerLost, match="rank 0 cannot hold the job's store at 127.0.0.1:.*Give a free port"):
        launch(0, 2, "127.0.0.1", store.port)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(PeerLost, match=r"rank 0 waited for all 2 ranks to start, and rank 1 did not come"):
        launch(0, 2, "127.0.0.1", store.port)


class Fails(torch.autograd.Function):
    """Fails in backward, as a wait for a tensor-parallel rank does."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise PeerLost("rank 3 did not come")


@ranks(1)
def test_an_error_in_a_stages_backward_is_not_hidden_by_the_schedule(rank: int, world: int) -> None:
    runner = start_pipeline(plan_pipeline(4, 1), "1F1B")
    inner = runner.forward_step
    runner.forward_step = lambda *given: Fails.apply(inner(*given).value)
    with pytest.raises(PeerLost, match="rank 3 did not come"):
        runner.step([microbatch(0, number) for number in range(2)])

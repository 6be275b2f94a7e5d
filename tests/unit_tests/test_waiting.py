"""Waits for other ranks: Ctrl-C is heard in them, and a start that fails names the ranks that did not come."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from core import parallel_state
from core.checkpoint import load_checkpoint, save_checkpoint
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.distributed.wire.collectives import Collectives
from core.groups.local_store import local_store
from core.pipeline_parallel import plan_pipeline
from core.tensor_parallel import mappings
from core.training.trainer import Trainer
from core.watch.waiting import LOOK_S, PeerLost, starting, use_watch, waiting
from tests.unit_tests.pipeline_parallel.pipeline_reference import microbatch, start_pipeline
from tests.unit_tests.ranks import ranks


@ranks(2)
def test_ctrl_c_is_heard_while_another_rank_is_late(rank: int, world: int) -> None:
    """In a user's own loop: in the reduction of gradients, and between the layers of a split model."""
    group = dist.group.WORLD
    assert group is not None
    for call in (
        lambda tensor: Collectives().all_reduce(tensor, group, "gradients").wait(),
        lambda tensor: tensor.copy_(mappings.all_reduce(tensor, group)),
    ):
        tensor = torch.full((3,), 1.0 + rank)
        if rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            began = time.monotonic()
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                call(tensor)
            assert time.monotonic() - began < LOOK_S + 1.0
        else:
            time.sleep(LOOK_S + 2.0)
            call(tensor)
            assert tensor.tolist() == [3.0] * 3


def test_a_rank_that_does_not_come_to_the_start_is_named() -> None:
    store = local_store()
    words = r"rank 0 waited for all 3 ranks to start, and rank 2 did not come \(none\)"
    with pytest.raises(PeerLost, match=words), starting(store, 0, 3):
        store.set("came/1", "")
        raise dist.DistStoreError("none")


class Ended:
    """A watch that has found that rank 1 has ended."""

    lost = {1: "it has ended"}  # noqa: RUF012

    def account(self, wait: waiting) -> str:
        return "; rank 1 has ended"

    def beats_in_vain(self, patience_s: float) -> dict[int, int]:
        return {}


def closed(*given: Any, **options: Any) -> None:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")


@ranks(1)
def test_torchs_own_collectives_of_a_checkpoint_and_the_mean_loss_name_the_lost_rank(
    rank: int, world: int, tmp_path: Path
) -> None:
    parallel_state.initialize_model_parallel()
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), torch.nn.Linear(2, 2))
    save_checkpoint(tmp_path, 1, [model])
    use_watch(Ended())
    for name, what, act in (
        ("save", "the other ranks' part of a save", lambda: save_checkpoint(tmp_path, 2, [model])),
        ("load", "the other ranks' part of a load", lambda: load_checkpoint(tmp_path, [model])),
        ("all_reduce", "the mean loss", lambda: Trainer._mean_over_ranks(None, torch.ones(()), 1, False)),  # type: ignore[arg-type]
    ):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(dist if name == "all_reduce" else dcp, name, closed)
            with pytest.raises(PeerLost, match=f"waited .* for {what}.*Connection closed.*; rank 1 has ended"):
                act()


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

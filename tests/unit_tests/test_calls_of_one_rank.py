"""A collective call that rank 0 alone makes, and training goes on: every rank ends in time, or the training is right.

A print, a save or an evaluation under `if rank == 0` is the habit of programs written for torch's DDP.
"""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.checkpoint import save_checkpoint
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.integrations import LoopOptimizer
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.watch import waiting
from tests.unit_tests.test_rank_watch import run_plain, said_by

STEPS, ALONE = 4, 2  # in step ALONE rank 0 makes the call
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
STRATEGIES: dict[str, dict[str, Any]] = {
    "no_shard": {"data_parallel_sharding_strategy": "no_shard"},
    "optim": {"data_parallel_sharding_strategy": "optim"},
    "optim, overlap": {"data_parallel_sharding_strategy": "optim", **OVERLAP},
    "optim_grads": {"data_parallel_sharding_strategy": "optim_grads"},
    "optim_grads_params": {"data_parallel_sharding_strategy": "optim_grads_params"},
}
Call = Callable[[Any, Any, Path], object]


def evaluate(model: Any, optimizer: Any, folder: Path) -> None:
    with torch.no_grad():
        model(torch.ones(2, 8))


def drop_a_step(model: Any, optimizer: Any, folder: Path) -> None:
    model(torch.ones(2, 8)).sum().backward()
    model.zero_grad_buffer()


def gather(model: Any, optimizer: Any, folder: Path) -> None:
    with model.gathered():
        pass


CALLS: dict[str, Call] = {
    "start_param_sync": lambda model, optimizer, folder: model.start_param_sync(),
    "finish_grad_sync": lambda model, optimizer, folder: model.finish_grad_sync(),
    "broadcast_params": lambda model, optimizer, folder: model.broadcast_params(),
    "begin_param_update": lambda model, optimizer, folder: model.begin_param_update(),
    "record_param_write": lambda model, optimizer, folder: model.record_param_write(),
    "unequal_weights": lambda model, optimizer, folder: model.unequal_weights(),
    "reduced_so_far": lambda model, optimizer, folder: model.reduced_so_far(),
    "state_dict": lambda model, optimizer, folder: model.state_dict(),
    "gathered": gather,
    "an evaluation": evaluate,
    "a step that is dropped": drop_a_step,
    "save_checkpoint": lambda model, optimizer, folder: save_checkpoint(folder / "root", 1, [model]),
    "finalize_model_grads": lambda model, optimizer, folder: finalize_model_grads([model]),
    "optimizer.state_dict": lambda model, optimizer, folder: optimizer.state_dict(),
    "optimizer.load_state_dict": lambda model, optimizer, folder: optimizer.load_state_dict(optimizer.state_dict()),
    "optimizer.step": lambda model, optimizer, folder: optimizer.step(),
    "get_grad_norm": lambda model, optimizer, folder: optimizer.get_grad_norm(),
    "count_zeros": lambda model, optimizer, folder: optimizer.count_zeros(),
    "LoopOptimizer.state_dict": lambda model, optimizer, folder: optimizer.state_dict(),
    "LoopOptimizer.collected": lambda model, optimizer, folder: optimizer.collected().__enter__(),
    "a barrier": lambda model, optimizer, folder: dist.barrier(),
}


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 1)).double()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    return model(x).square().mean()


def train(call: str, strategy: str, share: bool, folder: Path, rank: int) -> None:
    """Train; the error that ends it, or the sum of the weights, is in the log."""
    waiting.PATIENCE_S, waiting.LOOK_S = 1.0, 0.6
    config = DistributedDataParallelConfig(**STRATEGIES[strategy], share_host_memory=share, bucket_size=100)
    model = DistributedDataParallel(None, config, new_model())
    optimizer: Any = (
        LoopOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if call.startswith("Loop")
        else get_megatron_optimizer(
            OptimizerConfig(optimizer="sgd", lr=0.1, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0), [model]
        )
    )
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            finalize_model_grads([model])
            optimizer.step()
            if rank == 0 and step == ALONE:
                CALLS[call](model, optimizer, folder)
        with model.gathered():
            logging.error("sum %.12f", sum(float(param.detach().sum()) for param in model.module.parameters()))
    except RuntimeError as error:
        logging.error("ended by %s: %s", type(error).__name__, str(error).replace("\n", " "))
        raise


def sum_of_one_process() -> float:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        ((loss_of(model, step, 0) + loss_of(model, step, 1)) / 2).backward()
        optimizer.step()
    return sum(float(param.detach().sum()) for param in model.parameters())


@pytest.mark.in_suite(4)
@pytest.mark.parametrize("share", [False, True], ids=["sockets", "memory"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("call", CALLS)
def test_a_collective_call_of_one_rank_is_named_or_needs_no_other(
    call: str, strategy: str, share: bool, tmp_path: Path
) -> None:
    """Five pairs of call and strategy had no answer in 150 s, and fifteen aborted the process in gloo."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    statuses = run_plain(functools.partial(train, call, strategy, share, tmp_path), tmp_path, 2, -port)
    said = [said_by(tmp_path, rank) for rank in range(2)]
    assert statuses in ([0, 0], [1, 1]), said
    if statuses == [0, 0]:
        expected = f"sum {sum_of_one_process():.12f}"
        assert [lines[-1] for lines in said] == [expected, expected]
        return
    for lines in said:
        ended = next(line for line in lines if line.startswith("ended by "))
        assert ended.startswith(("ended by PeerLost", "ended by SyncError", "ended by RuntimeError")), ended
    assert any("PeerLost" in line or "SyncError" in line for lines in said for line in lines)

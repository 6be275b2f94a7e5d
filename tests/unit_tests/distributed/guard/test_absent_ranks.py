"""A rank leaves out a call of a step, or has fewer batches: the others say what they wait for, and who is absent."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    PeerLost,
    SyncError,
    finalize_model_grads,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.pipeline_parallel import PipelineLayout
from core.watch import rank_watch
from tests.unit_tests.pipeline_parallel.pipeline_reference import microbatch, start_pipeline
from tests.unit_tests.ranks import ranks

TIMEOUT_S, GRACE_S, SLOW_S = 2.0, 1.5, 4.0  # of the groups; of the look for others; for a busy machine
AGREEMENT = "for the agreement of data group dp_cp in finalize_model_grads (step 2), ranks 0, 1"

# How a rank of one host, or of several, reaches the others; and what it keeps.
WAYS = pytest.mark.parametrize(
    ("strategy", "share"),
    [
        pytest.param("no_shard", True, id="memory"),
        pytest.param("no_shard", False, id="sockets"),
        pytest.param("optim", True, id="sharded memory", marks=pytest.mark.nightly),
        pytest.param("optim", False, id="sharded sockets", marks=pytest.mark.nightly),
        pytest.param("optim_grads", False, id="streamed sockets", marks=pytest.mark.nightly),
    ],
)


def said(act: Callable[[], object], limit_s: float = TIMEOUT_S + GRACE_S + SLOW_S) -> str:
    """The error of an act as words, "" if it raises none; it comes within the group's timeout and the grace."""
    begun = time.monotonic()
    words = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_watch, "GRACE_S", GRACE_S)
        try:
            act()
        except (SyncError, PeerLost) as error:
            words = str(error)
    assert time.monotonic() - begun < limit_s
    return words


class Training:
    """SGD with a rate of 1 on the sum of the weights' products with the rank's own input, 1 or 3."""

    def __init__(self, rank: int, strategy: str, *, share: bool) -> None:
        parallel_state.initialize_model_parallel(distributed_timeout_minutes=TIMEOUT_S / 60)
        config = DistributedDataParallelConfig(
            data_parallel_sharding_strategy=strategy, share_host_memory=share, overlap_grad_reduce=True
        )
        self.model = DistributedDataParallel(None, config, torch.nn.Linear(4, 3))
        self.start = self.weight().clone()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="sgd", lr=1.0, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0), [self.model]
        )
        self.input = torch.full((4,), 1.0 + 2.0 * rank)

    def weight(self) -> torch.Tensor:
        return self.model.module.weight.detach()

    def backward(self) -> None:
        self.model.zero_grad_buffer()
        self.model(self.input).sum().backward()

    def step(self) -> None:
        self.backward()
        finalize_model_grads([self.model])
        self.optimizer.step()


def no_call() -> None:
    """Nothing: the rank is not there."""


@WAYS
@ranks(2)
def test_fewer_batches_on_a_rank(rank: int, world: int, strategy: str, share: bool) -> None:
    training = Training(rank, strategy, share=share)
    training.step()
    words = said(no_call if rank == 1 else training.step)
    if rank == 0:
        assert words.startswith("rank 0 waited ") and AGREEMENT in words
        assert "; rank 1 did not come: in " in words and ". Did a rank get fewer batches" in words
    dist.barrier()


@ranks(2)
def test_a_rank_with_fewer_batches_that_has_left_its_groups(rank: int, world: int) -> None:
    training = Training(rank, "no_shard", share=False)
    training.step()
    leave = parallel_state.destroy_model_parallel
    words = said(leave if rank == 1 else training.step)
    if rank == 0:
        assert AGREEMENT in words and ") has left without an error, and others wait for it" in words
    dist.barrier()


@WAYS
@ranks(2)
def test_a_batch_without_finalize_and_step_on_a_rank(rank: int, world: int, strategy: str, share: bool) -> None:
    """A training loop that leaves a batch by `continue`: its next step meets the others' last one."""
    training = Training(rank, strategy, share=share)
    training.step()

    def train() -> None:
        if rank == 1:
            training.backward()
        training.step()

    ends, drops = "rank 0 ends its step", "rank 1 drops its step (zero_grad)"
    assert f"the ranks of data group 'dp_cp' [0, 1] do not drop a step together: {ends}, {drops}" in said(train)
    dist.barrier()


@WAYS
@ranks(2)
def test_finalize_left_out_on_a_rank(rank: int, world: int, strategy: str, share: bool) -> None:
    training = Training(rank, strategy, share=share)
    training.step()
    training.backward()

    def end() -> None:
        if rank == 0:
            finalize_model_grads([training.model])
        training.optimizer.step()

    words = said(end)
    if rank == 0:
        assert AGREEMENT in words and "; rank 1 did not come" in words
    else:
        assert words.startswith("rank 1: optimizer.step() came while bucket 0") and "finalize_model_grads" in words
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize(
    ("strategy", "share"), [("no_shard", True), ("optim", False)], ids=["memory", "sharded sockets"]
)
def test_a_step_left_out_on_a_rank(rank: int, world: int, strategy: str, share: bool) -> None:
    training = Training(rank, strategy, share=share)
    training.step()
    training.backward()
    finalize_model_grads([training.model])
    words = said(training.step if rank == 1 else training.optimizer.step)
    norm, next_agreement = "the gradient norm in optimizer.step (step 2)", "dp_cp in finalize_model_grads (step 3)"
    here, there = (norm, next_agreement) if rank == 0 else (next_agreement, norm)
    waits, _, others = words.partition("; ")
    assert f"{here}, ranks 0, 1" in waits and others.startswith(f"rank {1 - rank} waited ") and there in others
    dist.barrier()


@WAYS
@ranks(2)
def test_no_sync_left_on_on_a_rank_gives_the_gradients_of_all(
    rank: int, world: int, strategy: str, share: bool
) -> None:
    training = Training(rank, strategy, share=share)
    training.step()
    if rank == 1:
        with training.model.no_sync():
            training.step()
    else:
        training.step()
    assert torch.allclose(training.weight(), training.start - 2 * torch.full((3, 4), (1.0 + 3.0) / 2))
    dist.barrier()


@ranks(2)
def test_fewer_microbatches_on_a_stage(rank: int, world: int) -> None:
    runner = start_pipeline(
        PipelineLayout.even(4, pp=2), "GPipe", groups={"distributed_timeout_minutes": TIMEOUT_S / 60}
    )
    runner.step([microbatch(0, number) for number in range(2)])
    words = said(lambda: runner.step([microbatch(0, number) for number in range(3 - rank)]))
    wait = "for the activations or gradients of a microbatch in PipelineRunner.step with {} microbatches (step 2)"
    here, _, there = words.partition("; ")
    assert here.startswith(f"rank {rank} waited ") and wait.format(3 - rank) + ", ranks 0, 1" in here
    assert there.startswith(f"rank {1 - rank} waited ") and wait.format(2 + rank) in there
    dist.barrier()

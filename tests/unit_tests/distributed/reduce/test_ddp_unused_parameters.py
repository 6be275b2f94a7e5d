"""Parameters that some rank, every rank or some batch does not use contribute zeros, and no one waits for them."""

import copy

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, check_steps, mean_over_ranks, whole_grads, wrap

HEADS = 4
# What each rank uses in each step.
PATTERNS = {
    "unused on one rank": lambda rank, step: [0, 2, 3] if rank == 1 else [0, 1, 2, 3],
    "unused on all ranks": lambda rank, step: [0, 1, 3],
    "used in batch 1 only": lambda rank, step: [0, 1, 2, 3] if step == 0 else [0, 3],
    "used in batch 2 only": lambda rank, step: [0, 1, 2, 3] if step == 1 else [0, 3],
    "used in batch 2 only, on one rank": lambda rank, step: [0, 1, 2, 3] if (step, rank) == (1, 1) else [0, 3],
    "unused in batch 2 only": lambda rank, step: [0, 3] if step == 1 else [0, 1, 2, 3],
    "another one on each rank and step": lambda rank, step: [(rank + step) % HEADS, (rank + 2 * step + 1) % HEADS],
    "nothing at all on one rank": lambda rank, step: [] if rank == 0 else [0, 1, 2, 3],
}


# Nothing is launched in backward then, so that only who has a gradient at the end makes a difference.
WITHOUT_OVERLAP = ("unused on all ranks", "another one on each rank and step", "nothing at all on one rank")


class Heads(nn.Module):
    """Heads of one size, so that buckets of different heads could be mistaken for one another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(5, 6, dtype=torch.float64)
        self.heads = nn.ModuleList(nn.Linear(6, 3, dtype=torch.float64) for _ in range(HEADS))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        return sum((self.heads[i](hidden).pow(2).sum() for i in used), torch.zeros((), dtype=torch.float64))


class LossWith:
    def __init__(self, pattern: str) -> None:
        self.used = PATTERNS[pattern]

    def __call__(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank + 10 * step)
        x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        return model(x, self.used(rank, step)) * (1 + rank)


@ranks(3)
@pytest.mark.parametrize("strategy", [pytest.param("no_shard", marks=pytest.mark.nightly), "optim", "optim_grads"])
@pytest.mark.in_suite(1)
def test_unused_parameters_contribute_zeros(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    for overlap in (False, True):
        for pattern in PATTERNS if overlap else WITHOUT_OVERLAP:
            model = Heads()
            plain = copy.deepcopy(model)
            ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=1)
            check_steps(ddp, plain, rank, world, 4, LossWith(pattern))


@ranks(4)
@pytest.mark.parametrize("overlap", [False, True])
def test_unused_parameters_with_two_optimizer_instances(rank: int, world: int, overlap: bool) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    for pattern in PATTERNS if overlap else WITHOUT_OVERLAP:
        model = Heads()
        plain = copy.deepcopy(model)
        ddp = wrap(
            model,
            use_distributed_optimizer=True,
            num_distributed_optimizer_instances=2,
            overlap_grad_reduce=overlap,
            bucket_size=20,
        )
        check_steps(ddp, plain, rank, world, 4, LossWith(pattern))


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_an_unused_parameter_does_not_keep_the_gradient_of_the_step_before(
    rank: int, world: int, strategy: str
) -> None:
    """Without zero_grad_buffer: torch's set_to_none is what begins a step, and it must empty the unused ones too."""
    parallel_state.initialize_model_parallel()
    for overlap in (False, True):
        model = Heads()
        plain = copy.deepcopy(model)
        loss = LossWith("used in batch 1 only")
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=1)
        for step in range(3):
            for param in ddp.parameters():
                param.grad = None
            loss(ddp, rank, step).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (step,), loss))


@ranks(2)
def test_a_bucket_that_waits_for_an_unused_parameter_leaves_in_the_next_backward_without_it(
    rank: int, world: int
) -> None:
    """Unused ones are learnt: from the second batch on they do not hold back the buckets that follow."""
    parallel_state.initialize_model_parallel()
    model = Heads()
    ddp = wrap(model, overlap_grad_reduce=True, bucket_size=1)
    launched = []
    for step in range(3):
        ddp.zero_grad_buffer()
        LossWith("unused on all ranks")(ddp, rank, step).backward()
        launched.append(ddp.reducer.next)
        finalize_model_grads([ddp])
    buckets = len(ddp.reducer.buckets)
    assert launched[0] < buckets
    assert launched[1:] == [buckets, buckets]


@ranks(3)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_a_rank_without_a_backward_takes_part_in_the_reduction(rank: int, world: int, strategy: str) -> None:
    """A rank whose batch ran out calls finalize alone; every other rank's step comes out right, in every step."""
    check_rank_without_backward(rank, world, strategy, set_to_none=False)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_a_rank_without_a_backward_after_set_to_none_takes_part_too(rank: int, world: int, strategy: str) -> None:
    """Its `.grad` are None and a forward ran: that is a new step, though no gradient arrives on this rank."""
    check_rank_without_backward(rank, world, strategy, set_to_none=True)


def check_rank_without_backward(rank: int, world: int, strategy: str, *, set_to_none: bool) -> None:
    """set_to_none: rank 0 runs the forward too, and the step begins by `.grad = None`, not by zero_grad_buffer()."""
    parallel_state.initialize_model_parallel()
    for overlap in (False, True):
        model = Heads()
        plain = copy.deepcopy(model)
        loss = LossWith("nothing at all on one rank")
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=1)
        for step in range(3):
            if set_to_none:
                for param in ddp.parameters():
                    param.grad = None
            else:
                ddp.zero_grad_buffer()
            if rank > 0:
                loss(ddp, rank, step).backward()
            elif set_to_none:
                loss(ddp, rank, step)
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (step,), loss))

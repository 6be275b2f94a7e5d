"""Kernels of the user's that add weight gradients to main_grad and give autograd a dummy in their place."""

from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, SyncError, finalize_model_grads
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, mean_over_ranks, whole_grads, wrap

SETTINGS = [(strategy, overlap) for strategy in ("no_shard", "optim", "optim_grads") for overlap in (False, True)]


class MegatronProduct(torch.autograd.Function):
    """The protocol of Megatron's and TransformerEngine's layers: a flag on the parameter, and a dummy gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = parameter
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        parameter = ctx.parameter
        if parameter.main_grad is None:  # gradients are sharded: there is nothing to add to
            return grad @ weight, grad.t() @ x, None
        parameter.main_grad.addmm_(grad.t(), x)
        parameter.grad_added_to_main_grad = True
        zeros = getattr(parameter, "zero_out_wgrad", False)
        return grad @ weight, torch.full_like(weight, 0.0 if zeros else float("nan")), None


class Kernels(nn.Module):
    """A fused layer used twice, and an embedding tied to a fused output, of which Megatron asks for zeros."""

    def __init__(self, declared: bool = True) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.fuse = True
        self.embedding = nn.Embedding(8, 6, dtype=torch.float64)
        self.embedding.weight.zero_out_wgrad = True
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self.plain = nn.Linear(6, 6, dtype=torch.float64)
        if declared:
            self.weight.grad_added_to_main_grad = self.embedding.weight.grad_added_to_main_grad = False

    def product(self, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        return MegatronProduct.apply(x, weight, weight) if self.fuse else x @ weight.t()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.product(self.embedding(tokens), self.weight))
        x = torch.tanh(self.product(torch.tanh(self.plain(x)), self.weight))
        return self.product(x, self.embedding.weight)


def token_loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 100 * number)
    tokens = torch.randint(0, 8, (5,), generator=generator)
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1), reduction="sum") * (1 + rank)


def plain_model() -> Kernels:
    model = Kernels()
    model.fuse = False
    return model


def run_step(ddp: DistributedDataParallel, rank: int, numbers: range) -> None:
    """Microbatches whose products are fused in every second one."""
    ddp.zero_grad_buffer()
    for number in numbers:
        ddp.module.fuse = number % 2 == 0
        if number < numbers[-1]:
            with ddp.no_sync():
                token_loss(ddp, rank, number).backward()
        else:
            token_loss(ddp, rank, number).backward()
    finalize_model_grads([ddp])


@ranks(2)
def test_a_dummy_gradient_next_to_a_fused_one_is_ignored(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        ddp = wrap(Kernels(), data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=1)
        for numbers in (range(0, 1), range(1, 3), range(3, 6)):  # fused; plain and fused; plain, fused and plain
            run_step(ddp, rank, numbers)
            assert_same(whole_grads(ddp), mean_over_ranks(plain_model(), world, numbers, token_loss))


@ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_kernel_that_was_not_declared_is_refused_by_name(rank: int, world: int, overlap: bool) -> None:
    """What autograd adds to the buffer in place cannot be taken out again, so it has to be known before."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(Kernels(declared=False), overlap_grad_reduce=overlap)
    with pytest.raises(SyncError, match=r"'weight'.*grad_added_to_main_grad = False.* before"):
        token_loss(ddp, rank, 0).backward()


@ranks(2)
def test_a_kernel_that_writes_where_no_gradient_of_this_step_lies_is_refused_by_name(rank: int, world: int) -> None:
    """torch's zero_grad leaves the last step's gradients in main_grad, which the kernel would add to."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(Kernels())
    run_step(ddp, rank, range(1))
    for param in ddp.parameters():
        param.grad = None
    ddp.module.fuse = True
    with pytest.raises(SyncError, match=r"zero_grad_buffer\(\)"):
        token_loss(ddp, rank, 0).backward()

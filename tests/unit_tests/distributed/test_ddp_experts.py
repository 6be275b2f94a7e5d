"""Expert parameters have a data group of their own and the divisor of the whole one; fused weight gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from core import parallel_state
from core.distributed import finalize_model_grads
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, check_steps, mean_over_ranks, whole_grads, wrap

SETTINGS = [(strategy, overlap) for strategy in ("no_shard", "optim", "optim_grads") for overlap in (False, True)]


class Experts(nn.Module):
    """Four layers, dense and expert ones in turn, all of one shape; `expert` chooses this rank's expert weights."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(6))
        for number, layer in enumerate(self.layers):
            torch.manual_seed(100 * number + (expert if number % 2 else 0))
            nn.init.normal_(layer.weight, std=0.5)
            nn.init.normal_(layer.bias, std=0.5)
            if number % 2:
                for param in layer.parameters():
                    param.allreduce = False

    def forward(self, x: torch.Tensor, skipped: int = -1) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = x + torch.tanh(layer(x))
        return x


def expert_loss(model: nn.Module, rank: int, step: int, skipped: int = -1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 10 * step)
    x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    return model(x, skipped).pow(2).sum() * (1 + rank)


def expert_reference(world: int, ep: int, rank: int, step: int, skipped: Any) -> dict[str, torch.Tensor]:
    """Dense: the mean over all ranks. Expert e: the sum over the ranks that hold e, divided by all ranks."""
    grads: dict[str, torch.Tensor] = {}
    for r in range(world):
        model = Experts(r % ep)
        (expert_loss(model, r, step, skipped(r, step)) / world).backward()
        for name, param in model.named_parameters():
            is_expert = int(name.split(".")[1]) % 2 == 1
            counts = not is_expert or r % ep == rank % ep
            grad = torch.zeros_like(param) if param.grad is None or not counts else param.grad
            grads[name] = grads.get(name, torch.zeros_like(param)) + grad
    return grads


STRATEGIES = ("no_shard", "optim", "optim_grads")


@ranks(4)
@pytest.mark.parametrize("combinations", ["some", pytest.param("all", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_are_summed_over_their_own_group_with_the_whole_groups_divisor(
    rank: int, world: int, strategy: str, combinations: str
) -> None:
    """Mixed buffers of equal shapes, and every rank leaves another layer out: a mixed-up launch order would show.

    some: each case overlapped, and one of them not; averaging in every other one, over the three tests in all of them.
    """
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    assert dist.get_world_size(parallel_state.get_expert_data_parallel_group()) == 2
    cases: list[Any] = [lambda r, s: -1, lambda r, s: (r + s) % 6, lambda r, s: 2 * ((r + s) % 3) + 1]
    for overlap in (False, True):
        for average in (False, True):
            for number, skipped in enumerate(cases):
                place = STRATEGIES.index(strategy)
                wanted = number + place if overlap else place
                if combinations == "some" and (average != bool(wanted % 2) or not (overlap or number == place)):
                    continue
                ddp = wrap(
                    Experts(rank % 2),
                    data_parallel_sharding_strategy=strategy,
                    overlap_grad_reduce=overlap,
                    average_in_collective=average,
                    bucket_size=1,
                )
                assert len(ddp.grad_buffers) == len(ddp.expert_parallel_buffers) == 1
                for step in range(3):
                    ddp.zero_grad_buffer()
                    expert_loss(ddp, rank, step, skipped(rank, step)).backward()
                    finalize_model_grads([ddp])
                    assert_same(whole_grads(ddp), expert_reference(world, 2, rank, step, skipped))


@ranks(8)
def test_experts_with_two_optimizer_instances(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, num_distributed_optimizer_instances=2)
    for overlap in (False, True):
        ddp = wrap(
            Experts(rank % 2),
            use_distributed_optimizer=True,
            num_distributed_optimizer_instances=2,
            overlap_grad_reduce=overlap,
            bucket_size=60,
        )
        (dense,), (expert,) = ddp.grad_buffers, ddp.expert_parallel_buffers
        assert dist.get_world_size(dense.buckets[0].groups.shard) == 4
        assert dist.get_world_size(expert.buckets[0].groups.shard) == 2

        def skipped(r: int, s: int) -> int:
            return (r + s) % 6

        for step in range(2):
            ddp.zero_grad_buffer()
            expert_loss(ddp, rank, step, skipped(rank, step)).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), expert_reference(world, 2, rank, step, skipped))


@ranks(4)
def test_initial_weights_of_experts_are_compared_and_broadcast_inside_their_own_group(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    wrap(Experts(rank % 2))  # different experts are no difference
    model = Experts(rank % 2)
    with torch.no_grad():
        if rank == 3:
            model.layers[1].weight += 1.0
            model.layers[2].bias += 1.0
    ddp = wrap(model, initial_weights="broadcast")
    for name, want in Experts(rank % 2).named_parameters():
        assert torch.equal(ddp.module.get_parameter(name), want), name


class FusedProduct(torch.autograd.Function):
    """The protocol of a layer of the user's own that adds its weight gradient into main_grad."""

    fused = 0  # how often it did

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = parameter
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        main_grad = getattr(ctx.parameter, "main_grad", None)
        if main_grad is None or ctx.parameter.grad is not main_grad:
            return grad @ weight, grad.t() @ x, None
        main_grad.addmm_(grad.t().to(main_grad.dtype), x.to(main_grad.dtype))
        FusedProduct.fused += 1
        return grad @ weight, None, None


class Fused(nn.Module):
    """An embedding tied to a fused output, and a fused layer used twice."""

    fuse = True

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.recompute = recompute
        self.embedding = nn.Embedding(8, 6, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self.plain = nn.Linear(6, 6, dtype=torch.float64)

    def product(self, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        return FusedProduct.apply(x, weight, weight) if self.fuse else x @ weight.t()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.product(torch.tanh(self.plain(torch.tanh(self.product(x, self.weight)))), self.weight))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        return self.product(x, self.embedding.weight)


class NotFused(Fused):
    fuse = False


def token_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 100 * step)
    tokens = torch.randint(0, 8, (5,), generator=generator)
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1), reduction="sum") * (1 + rank)


@ranks(2)
def test_fused_weight_gradients_tied_twice_used_and_recomputed(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        for recompute in (False, True):
            FusedProduct.fused = 0
            ddp = wrap(
                Fused(recompute),
                data_parallel_sharding_strategy=strategy,
                overlap_grad_reduce=overlap,
                bucket_size=1,
            )
            check_steps(ddp, NotFused(), rank, world, 3, token_loss)
            if strategy == "optim_grads":  # there is no lasting gradient to add to
                assert FusedProduct.fused == 0
            else:
                assert FusedProduct.fused >= 3, "the fused path was not taken"


@ranks(2)
@pytest.mark.parametrize("zero", ["buffer", "set_to_none", "nothing"])
def test_fused_weight_gradients_after_every_way_of_zeroing_late_and_under_no_sync(
    rank: int, world: int, zero: str
) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        if zero == "nothing" and strategy == "no_shard":
            continue
        FusedProduct.fused = 0
        ddp = wrap(Fused(), data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=1)
        for step in range(3):
            if zero == "buffer":
                ddp.zero_grad_buffer()
            elif zero == "set_to_none":
                torch.optim.SGD(ddp.parameters(), lr=0.1).zero_grad(set_to_none=True)
            with ddp.no_sync():
                token_loss(ddp, rank, 3 * step).backward()
            token_loss(ddp, rank, 3 * step + 1).backward()
            token_loss(ddp, rank, 3 * step + 2).backward()  # late under overlap
            finalize_model_grads([ddp])
            first = 0 if zero == "nothing" else 3 * step  # backward adds to what is still in `.grad`
            microbatches = tuple(range(first, 3 * step + 3))
            assert_same(whole_grads(ddp), mean_over_ranks(NotFused(), world, microbatches, token_loss))
        assert FusedProduct.fused > 0 or zero != "buffer" or strategy == "optim_grads"

"""Gradients that arrive more than once, late, or in an order no one expected."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from core import parallel_state
from core.distributed import finalize_model_grads
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, check_steps, loss_of, make_net, mean_over_ranks, whole_grads, wrap

SETTINGS = [(strategy, overlap) for strategy in ("no_shard", "optim", "optim_grads") for overlap in (False, True)]


def data(rank: int, step: int, columns: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 100 * step)
    return torch.randn(4, columns, generator=generator, dtype=torch.float64)


class Tied(nn.Module):
    """Every way in which one weight meets two gradients: tied to another layer, and used twice itself."""

    def __init__(self, recompute: str = "no") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.recompute = recompute
        self.embedding = nn.Embedding(9, 6, dtype=torch.float64)
        self.twice = nn.Linear(6, 6, dtype=torch.float64)
        self.between = nn.Linear(6, 6, dtype=torch.float64)
        self.output = nn.Linear(6, 9, bias=False, dtype=torch.float64)
        self.output.weight = self.embedding.weight

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.twice(x))
        x = torch.tanh(self.between(x))
        return torch.tanh(self.twice(x))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.recompute == "no":
            return self.output(self.body(x))
        reentrant = self.recompute == "reentrant"
        x = checkpoint(self.body, x, use_reentrant=reentrant)
        x = checkpoint(self.body, x, use_reentrant=reentrant)
        return checkpoint(self.output, x, use_reentrant=reentrant)


class TiedTwice(Tied):
    """Without recomputation, but the same function as with it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.body(self.body(self.embedding(tokens))))


def token_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 100 * step)
    tokens = torch.randint(0, 9, (5,), generator=generator)
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1), reduction="sum") * (1 + rank)


@ranks(2, 3)
@pytest.mark.in_suite(1)
def test_a_weight_used_twice_and_tied_inside_a_stage_gets_the_sum(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        for bucket_size in (1, 50, None):
            model = Tied()
            plain = copy.deepcopy(model)
            ddp = wrap(
                model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=bucket_size
            )
            check_steps(ddp, plain, rank, world, 3, token_loss)


@ranks(2)
@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_recomputation_of_tied_and_twice_used_weights_changes_nothing(rank: int, world: int, recompute: str) -> None:
    """Reentrant recomputation runs a backward of its own a segment: each sees only a part of the weight's gradient."""
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        plain = TiedTwice()
        ddp = wrap(
            Tied(recompute), data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=1
        )
        check_steps(ddp, plain, rank, world, 3, token_loss)


def two_losses(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The sum of what `two_backwards` sends through backward one after the other."""
    return loss_of(model, rank, 2 * step) + loss_of(model, rank, 2 * step + 1)


@ranks(2)
@pytest.mark.parametrize("when", ["from the first batch", "from the second batch", "in the second batch only"])
@pytest.mark.in_suite(2)
def test_two_backwards_in_one_microbatch_add_up(rank: int, world: int, when: str) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        for on_all_ranks in (True, False):
            model = make_net()
            plain = copy.deepcopy(model)
            ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=30)

            def twice(rank: int, step: int, on_all_ranks: bool = on_all_ranks) -> bool:
                here = on_all_ranks or rank == 1
                return here and {"from the first batch": True, "from the second batch": step > 0}.get(when, step == 1)

            def loss(model: nn.Module, rank: int, step: int, twice: Callable[[int, int], bool] = twice) -> torch.Tensor:
                return two_losses(model, rank, step) if twice(rank, step) else loss_of(model, rank, step)

            for step in range(4):
                ddp.zero_grad_buffer()
                if twice(rank, step):
                    loss_of(ddp, rank, 2 * step).backward()
                    loss_of(ddp, rank, 2 * step + 1).backward()
                else:
                    loss_of(ddp, rank, step).backward()
                finalize_model_grads([ddp])
                assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (step,), loss))


@ranks(4)
def test_late_gradients_with_two_optimizer_instances(rank: int, world: int) -> None:
    """What comes after a bucket has left is reduced in a second round, inside and across the instances."""
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    model = make_net()
    plain = copy.deepcopy(model)
    ddp = wrap(
        model,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=2,
        overlap_grad_reduce=True,
        bucket_size=30,
    )

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return two_losses(model, rank, step) if rank == 2 else loss_of(model, rank, 2 * step)

    for step in range(3):
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, 2 * step).backward()
        if rank == 2:
            loss_of(ddp, rank, 2 * step + 1).backward()
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (step,), loss))
        # Rank 2 learns to wait for the second one; then nothing is late any more.
        assert ddp.step_report().late_buckets == (len(ddp.reducer.buckets) if step == 0 else 0)


@ranks(2)
def test_retained_graphs_and_accumulated_late_gradients(rank: int, world: int) -> None:
    """Three backwards over one graph: the second and the third land on the same late gradient."""
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        plain = copy.deepcopy(model)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=1)

        def thrice(value: torch.Tensor) -> None:
            value.backward(retain_graph=True)
            value.backward(retain_graph=True)
            value.backward()

        for step in range(2):
            ddp.zero_grad_buffer()
            thrice(loss_of(ddp, rank, step))
            finalize_model_grads([ddp])
            expected = mean_over_ranks(plain, world, (step,))
            assert_same(whole_grads(ddp), {name: 3 * grad for name, grad in expected.items()})


class Backwards(nn.Module):
    """Runs its layers in the reverse of their registration."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def backwards_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(data(rank, step)).pow(2).sum() * (1 + rank)


class OrderOfItsOwn(Backwards):
    """Another order on each rank: gradients of equally large buckets become ready in different orders."""

    def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:  # type: ignore[override]
        for i in range(5):
            x = torch.tanh(self.layers[(i * (rank + 1) + rank) % 5](x))
        return x


def own_order_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(data(rank, step), rank).pow(2).sum() * (1 + rank)


@ranks(3)
def test_layers_that_run_in_another_order_than_they_were_registered(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        for kind, loss in ((Backwards, backwards_loss), (OrderOfItsOwn, own_order_loss)):
            model = kind()
            plain = copy.deepcopy(model)
            ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=1)
            check_steps(ddp, plain, rank, world, 3, loss)


@ranks(2)
def test_microbatches_whose_graphs_are_built_first_and_run_backward_later(rank: int, world: int) -> None:
    """A pipeline's order: two forwards, then two backwards, the first one under no_sync."""
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        expected = mean_over_ranks(model, world, (0, 1))
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=1)
        for _ in range(3):
            ddp.zero_grad_buffer()
            first, second = loss_of(ddp, rank, 0), loss_of(ddp, rank, 1)
            with ddp.no_sync():
                first.backward()
            second.backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), expected)

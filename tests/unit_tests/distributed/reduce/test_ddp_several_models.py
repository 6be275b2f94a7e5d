"""Several wrapped models on one data group: their reductions keep one order on all ranks, whatever each rank uses."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, mean_over_ranks, whole_grads, wrap


class Stack(nn.Module):
    """Layers of one size, so that buckets of different models could be mistaken for one another."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Family(nn.Module):
    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)


def inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 10 * step)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def some_modalities(family: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A rank whose batch holds no images does not call the second model at all."""
    text, images, trunk = family.models
    x = text(inputs(rank, step))
    if (rank + step) % 3 > 0:
        x = x + images(inputs(rank, step + 50))
    return trunk(x).pow(2).sum() * (1 + rank)


def images_first(family: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The model that some ranks skip is the first one that the others call."""
    text, images, trunk = family.models
    x = torch.zeros(3, 4, dtype=torch.float64)
    if (rank + step) % 3 > 0:
        x = x + images(inputs(rank, step + 50))
    return trunk(x + text(inputs(rank, step))).pow(2).sum() * (1 + rank)


def own_order(family: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Each rank calls the models in another order."""
    x = inputs(rank, step)
    for number in range(3):
        x = family.models[(number * (1 + rank % 2) + rank + step) % 3](x)
    return x.pow(2).sum() * (1 + rank)


def used_twice(family: nn.Module, rank: int, step: int) -> torch.Tensor:
    """One model is called before and after another one, on some ranks."""
    text, images, trunk = family.models
    x = trunk(images(text(inputs(rank, step))))
    if rank == 1:
        x = text(x)
    return x.pow(2).sum() * (1 + rank)


LOSSES = [some_modalities, images_first, own_order, used_twice]


FINALIZE = ("together", "apart", "in reverse")


@ranks(3)
@pytest.mark.parametrize("losses", ["every third", pytest.param("all", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("finalize", FINALIZE)
@pytest.mark.in_suite(1)
def test_models_that_ranks_use_differently_are_reduced_right(rank: int, world: int, finalize: str, losses: str) -> None:
    """Every third: over the three tests, any two of finalize, strategy and loss meet once."""
    parallel_state.initialize_model_parallel()
    plain = Family(Stack(1), Stack(2), Stack(3))
    for place, strategy in enumerate(("no_shard", "optim", "optim_grads")):
        for number, loss in enumerate(LOSSES):
            if losses != "all" and (place + number) % 3 != FINALIZE.index(finalize):
                continue
            options: dict[str, Any] = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": True}
            wrapped = [wrap(copy.deepcopy(model), bucket_size=1, **options) for model in plain.models]
            for step in range(4):
                for ddp in wrapped:
                    ddp.zero_grad_buffer()
                loss(Family(*wrapped), rank, step).backward()
                if finalize == "together":
                    finalize_model_grads(wrapped)
                else:
                    for ddp in wrapped if finalize == "apart" else reversed(wrapped):
                        finalize_model_grads([ddp])
                expected = mean_over_ranks(plain, world, (step,), loss)
                got = {f"models.{n}.{name}": g for n, ddp in enumerate(wrapped) for name, g in whole_grads(ddp).items()}
                try:
                    assert_same(got, expected)
                except AssertionError as error:
                    raise AssertionError(f"{strategy}, {loss.__name__}, step {step}: {error}") from error


def fake_or_real(family: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator, critic = family.models
    return critic(generator(inputs(rank, step))).pow(2).sum() * (1 + rank)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_two_models_trained_in_turn_with_the_others_gradients_dropped(rank: int, world: int, strategy: str) -> None:
    """A GAN's step: the generator's loss also fills the critic's gradients, which are zeroed and not finalized."""
    parallel_state.initialize_model_parallel()
    plain = Family(Stack(1), Stack(2))
    options: dict[str, Any] = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": True}
    generator, critic = (wrap(copy.deepcopy(model), bucket_size=1, **options) for model in plain.models)
    family = Family(generator, critic)
    for step in range(4):
        expected = mean_over_ranks(plain, world, (step,), fake_or_real)
        critic.zero_grad_buffer()
        fake_or_real(family, rank, step).backward()
        finalize_model_grads([critic])
        assert_same({f"models.1.{n}": g for n, g in whole_grads(critic).items()}, part(expected, 1))
        generator.zero_grad_buffer()
        critic.zero_grad_buffer()
        fake_or_real(family, rank, step).backward()
        finalize_model_grads([generator])
        assert_same({f"models.0.{n}": g for n, g in whole_grads(generator).items()}, part(expected, 0))
        generator.zero_grad_buffer()


def part(grads: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    return {name: grad for name, grad in grads.items() if name.startswith(f"models.{number}.")}

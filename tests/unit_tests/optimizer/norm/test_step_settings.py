"""Ranks that would step with different learning rates, decay or limits are told so before any of them steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import LowLevelZeroPlugin
from core.distributed import SyncError, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.norm.step_settings import (
    DIGEST_BITS,
    Settings,
    digest,
    digest_terms,
    first_difference,
    same_digest,
    settings_of,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, wrap


def sums_of(settings: list[Settings], problem_on: int | None = None) -> tuple[int, int]:
    """The two sums over ranks with these settings."""
    terms = [digest_terms(found, problem=rank == problem_on) for rank, found in enumerate(settings)]
    return sum(first for first, _ in terms), sum(second for _, second in terms)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 64])
def test_ranks_agree_only_where_all_settings_are_equal_and_none_has_a_problem(world: int) -> None:
    usual, other = settings_of([{"lr": 1e-3}], {}), settings_of([{"lr": 2e-3}], {})
    for found in (usual, other, ()):
        assert same_digest(world, *sums_of([found] * world))
        assert not same_digest(world, *sums_of([found] * world, problem_on=world - 1))
    for odd in range(world):
        mixed = [other if rank == odd else usual for rank in range(world)]
        assert same_digest(world, *sums_of(mixed)) == (world == 1)
        assert not same_digest(world, *sums_of(mixed, problem_on=odd))


def test_sums_of_the_largest_job_are_exact() -> None:
    largest = (2**DIGEST_BITS - 1) ** 2 * 2**17 + 1  # a digest's square x ranks, and a problem
    assert largest < 2**53 and float(largest) == largest


def test_settings_are_numbers_in_words_and_nothing_else() -> None:
    group = {
        "params": [torch.zeros(3)], "lr": torch.tensor(0.5), "betas": (0.9, 0.95), "name": "adam", "eps": 1e-8,
        "fused": None, "nesterov": True, "state": object(), "matrix": torch.zeros(2), "mixed": (1, object()),
        "param_names": ["a", "b"],
    }  # fmt: skip
    assert {what + name: value for what, value, name in settings_of([group], {"clip_grad": math.inf})} == {
        "clip_grad": "inf",
        "betas of param group 0 (adam)": "(0.9, 0.95)",
        "eps of param group 0 (adam)": "1e-08",
        "lr of param group 0 (adam)": "0.5",
        "nesterov of param group 0 (adam)": "True",
    }


def test_ranks_may_choose_their_kernels_and_call_their_groups_what_they_like() -> None:
    """A host with apex and one without, a rank that has nothing to step: their groups list different things."""
    numbers = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    torchs = {**numbers, "amsgrad": False, "maximize": False, "foreach": None, "fused": True, "capturable": False}
    ours = settings_of([{**torchs, "decoupled_weight_decay": True, "name": "of rank 0"}], {})
    theirs = settings_of([{**numbers, "name": "of rank 1"}], {})
    assert digest(ours) == digest(theirs) and first_difference({0: ours, 1: theirs}) is None
    counting = settings_of([{**numbers, "step": 7}], {})
    assert digest(counting) == digest(theirs) and first_difference({0: counting, 1: theirs}) is None
    other = settings_of([{**numbers, "maximize": True, "name": "of rank 1"}], {})
    assert digest(other) != digest(ours)
    assert first_difference({0: ours, 1: other}) == (
        "maximize of param group 0 (of rank 1) is True on rank 1 and not set on rank 0"
    )


@pytest.mark.parametrize("key", ["lr", "weight_decay", "momentum"])
def test_a_whole_number_is_compared_where_it_is_no_count(key: str) -> None:
    assert digest(settings_of([{key: 1}], {})) != digest(settings_of([{key: 2}], {}))
    assert digest(settings_of([], {"clip_grad": 1})) != digest(settings_of([], {"clip_grad": 2}))


def test_a_last_bit_is_no_difference() -> None:
    """Hosts of different kinds may compute a cosine with another one."""
    lr = 0.1 * (1 + math.cos(1.0))
    assert settings_of([{"lr": lr}], {}) == settings_of([{"lr": math.nextafter(lr, 1.0)}], {})
    assert settings_of([{"lr": 1}], {}) == settings_of([{"lr": 1.0}], {}) == settings_of([{"lr": np.float32(1)}], {})


def test_the_first_difference_is_named() -> None:
    settings = {rank: settings_of([{"lr": 1e-3}], {"clip_grad": 1.0}) for rank in (4, 0, 2)}
    assert first_difference(settings) is None
    settings[4] = settings_of([{"lr": 3e-3}], {"clip_grad": 1.0})
    assert first_difference(settings) == "lr of param group 0 is 0.003 on rank 4 and 0.001 on rank 0"
    settings[2] = settings_of([{"lr": 1e-3}, {"lr": 1e-3}], {"clip_grad": 1.0})
    assert first_difference(settings) == "lr of param group 1 is 0.001 on rank 2 and not set on rank 0"


DIFFERENT: dict[str, Any] = {
    "learning rate": (lambda optimizer: optimizer.param_groups[0].update(lr=0.3), "lr of param group 0 .* is 0.3"),
    "decay": (lambda optimizer: optimizer.param_groups[1].update(weight_decay=0.7), "weight_decay of param group 1"),
    "limit": (
        lambda optimizer: setattr(optimizer, "config", replace(optimizer.config, clip_grad=5.0)),
        "clip_grad is 5",
    ),
}


@ranks(2, 3)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.in_suite()
def test_no_rank_steps_where_one_would_step_differently(
    rank: int, world: int, what: str, share: bool, strategy: str
) -> None:
    parallel_state.initialize_model_parallel()
    model = wrap(make_net(), data_parallel_sharding_strategy=strategy, share_host_memory=share)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.1, clip_grad=1.0), [model])
    change, message = DIFFERENT[what]
    for step in range(2):
        loss_of(model, rank, 0).backward()
        finalize_model_grads([model])
        before = [param.detach().clone() for param in model.parameters()]
        if step == 0:
            assert optimizer.step()[0]  # alike: nothing is said
            assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            optimizer.zero_grad()
            continue
        if rank == world - 1:
            change(optimizer)
        with pytest.raises(SyncError, match=f"{message}.* on rank {world - 1} and .* on rank 0"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Counting(torch.optim.Optimizer):
    """SGD that counts its steps in its groups, as apex's FusedAdam does."""

    needs_shapes = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"])


@ranks(2)
def test_a_count_in_the_groups_of_a_rank_with_an_empty_shard_stands_still(rank: int, world: int) -> None:
    booster = Booster(plugin=LowLevelZeroPlugin(1, "fp32"))
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    user = Counting(model.parameters())
    model, optimizer, *_ = booster.boost(model, user)
    for _ in range(3):
        booster.backward(model(torch.full((1, 1), 0.25)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert user.param_groups[0].get("step", 0) == (0 if rank else 3)
    assert next(iter(model.parameters())).item() == 1.0 - 3 * 0.5 * 0.25


@ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("layout", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_ranks_with_other_parts_of_the_model_are_compared_too(
    rank: int, world: int, layout: str, norm_type: float
) -> None:
    parallel_state.initialize_model_parallel(**{layout: 2})
    model = wrap(make_net(), data_parallel_sharding_strategy="optim")
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, grad_norm_type=norm_type), [model])
    loss_of(model, parallel_state.get_data_parallel_rank(), 0).backward()
    finalize_model_grads([model])
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(SyncError, match="lr of param group 0 .* is 0.2 on rank 1 and 0.1 on rank 0"):
        optimizer.step()

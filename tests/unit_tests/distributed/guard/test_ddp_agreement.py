"""What ranks must agree on when they wrap: every rank is told, at once, and by name."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import ContractError, LayoutMismatch, declare_gradient, finalize_model_grads
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

ODD = 2  # the rank whose model differs


def renamed() -> nn.Module:
    model = make_net()
    model.other = model.norm
    del model.norm
    return model


def longer() -> nn.Module:
    model = make_net()
    model.fourth = nn.Linear(2, 2, dtype=torch.float64)
    return model


def shorter() -> nn.Module:
    model = make_net()
    del model.third
    return model


def wider() -> nn.Module:
    return make_net(width=8)


def partly_single() -> nn.Module:
    model = make_net()
    model.second.to(torch.float32)
    return model


def partly_frozen() -> nn.Module:
    model = make_net()
    model.norm.bias.requires_grad_(False)
    return model


def reordered() -> nn.Module:
    """The same parameters; two of equal shape have changed places."""
    model = make_net()
    bias, weight = model.norm.bias, model.norm.weight
    del model.norm.bias, model.norm.weight
    model.norm.bias, model.norm.weight = bias, weight
    return model


def transposed() -> nn.Module:
    """As many elements, another shape."""
    model = make_net()
    model.second.weight = nn.Parameter(model.second.weight.detach().t().contiguous())
    return model


DIFFERENCES: dict[Callable[[], nn.Module], list[str]] = {
    renamed: ["'norm.weight'"],
    longer: ["'fourth.weight'"],
    shorter: ["'third.weight'"],
    wider: ["'first.weight'", "[8, 5]", "[7, 5]"],
    partly_single: ["'second.weight'", "float32", "float64"],
    partly_frozen: ["'norm.bias'", "frozen", "trained"],
    reordered: ["'norm.bias'", "'norm.weight'"],
    transposed: ["'second.weight'", "[7, 11]", "[11, 7]"],
}


@ranks(3)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_the_first_difference_is_named_on_every_rank_within_seconds(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    for build, words in DIFFERENCES.items():
        model = build() if rank == ODD else make_net()
        dist.barrier()
        begun = time.monotonic()
        with pytest.raises(LayoutMismatch) as caught:
            wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True)
        assert time.monotonic() - begun < 10.0
        text = str(caught.value)
        for word in (*words, f"rank {ODD} has", "rank 0 has", "dp_cp"):
            assert word in text, f"{build.__name__}: {word} is not in: {text}"
        said: list[str] = [""] * world
        dist.all_gather_object(said, text)
        assert said == [text] * world
    # Nothing of it is left on the wire: the next wrap and step are right.
    model = make_net()
    expected = mean_over_ranks(model, world)
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    assert_same(whole_grads(ddp), expected)


@ranks(3)
def test_configs_that_reduce_differently_are_refused_on_every_rank(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    different = [
        {"use_distributed_optimizer": True},
        {"grad_reduce_in_fp32": True},
        {"overlap_grad_reduce": True, "bucket_size": 1},
        {"average_in_collective": True},
        {"deterministic_reduction": True},
        {"initial_weights": "ignore"},
        {"check_for_nan_in_grad": True},
        {"check_replicas": True},
    ]
    for options in different:
        dist.barrier()
        begun = time.monotonic()
        with pytest.raises(LayoutMismatch, match=r"rank 2 has .*; rank 0 has ") as caught:
            wrap(make_net(torch.float32 if "grad_reduce_in_fp32" in options else torch.float64), None, **options) if (
                rank == ODD
            ) else wrap(make_net(torch.float32 if "grad_reduce_in_fp32" in options else torch.float64))
        assert time.monotonic() - begun < 10.0, options
        assert str(caught.value)


@ranks(3)
def test_an_error_that_one_rank_finds_alone_is_raised_on_all(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    if rank == ODD:
        model.norm.weight.tensor_model_parallel = True
        model.norm.weight.average_gradients_across_tp_domain = True
    begun = time.monotonic()
    with pytest.raises(ContractError if rank == ODD else LayoutMismatch, match="'norm.weight'.*average_gradients"):
        wrap(model)
    assert time.monotonic() - begun < 10.0
    model = make_net()
    if rank == ODD:
        model.first = nn.Linear(5, 7, device="meta")
    with pytest.raises((ValueError, LayoutMismatch), match="'first.weight' is on the meta device"):
        wrap(model)
    model = make_net()
    if rank == ODD:
        declare_gradient(model.norm.weight, partial_over=("nonsense",))
    with pytest.raises((ValueError, RuntimeError), match="nonsense"):
        wrap(model)
    wrap(make_net())


@ranks(3)
def test_different_initial_weights_are_named_or_repaired_or_left(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()

    def build() -> nn.Module:
        model = make_net()
        with torch.no_grad():
            if rank == 1:
                model.second.weight[3, 4] += 1e-12  # one bit somewhere
                model.third.bias += 1.0
        return model

    for strategy in ("no_shard", "optim", "optim_grads"):
        with pytest.raises(LayoutMismatch, match="'second.weight' has other values on ranks .1. than on rank 0"):
            wrap(build(), data_parallel_sharding_strategy=strategy)
        model = build()
        expected = mean_over_ranks(make_net(), world)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, initial_weights="broadcast")
        for name, param in make_net().named_parameters():
            assert torch.equal(ddp.module.get_parameter(name), param), name
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), expected)
        left = wrap(build(), data_parallel_sharding_strategy=strategy, initial_weights="ignore")
        assert torch.equal(left.module.third.bias, build().third.bias)
        left.broadcast_params()
        assert torch.equal(left.module.third.bias, make_net().third.bias)


@ranks(2)
def test_weights_that_differ_by_a_permutation_or_a_sign_are_found(rank: int, world: int) -> None:
    """What a sum or a norm alone would not see."""
    parallel_state.initialize_model_parallel()

    def swapped(weight: torch.Tensor) -> None:
        weight.copy_(weight.flip(0))

    def far_swap(weight: torch.Tensor) -> None:
        """Two elements a whole number of checksum columns apart."""
        flat = weight.view(-1)
        flat[[0, 61]] = flat[[61, 0]].clone()

    def negated(weight: torch.Tensor) -> None:
        weight.neg_()

    for change in (swapped, negated, far_swap):
        model = make_net()
        if rank == 1:
            with torch.no_grad():
                change(model.second.weight)
        with pytest.raises(LayoutMismatch, match="'second.weight' has other values"):
            wrap(model)


@ranks(2)
def test_an_exception_on_one_rank_inside_a_step_does_not_wedge_the_next(rank: int, world: int) -> None:
    """Rank 1's forward fails in the middle of a step; both ranks drop the step and go on."""
    parallel_state.initialize_model_parallel()
    for strategy in ("no_shard", "optim", "optim_grads"):
        model = make_net()
        expected = mean_over_ranks(model, world)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=1)
        for _ in range(2):
            ddp.zero_grad_buffer()
            try:
                if rank == 1:
                    raise ValueError("a bad sample")
                with ddp.no_sync():
                    loss_of(ddp, rank, 5).backward()
            except ValueError:
                pass
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, 0).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), expected)

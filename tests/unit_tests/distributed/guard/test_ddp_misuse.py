"""Uses that could go wrong in silence: each gives the right gradients, or is refused."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, SyncError, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.distributed.test_ddp_experts import Experts, expert_loss, expert_reference
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, train, whole_grads, wrap

SETTINGS = [(strategy, overlap) for strategy in ("no_shard", "optim", "optim_grads") for overlap in (False, True)]


def right_or_refused(ddp: DistributedDataParallel, expected: dict[str, torch.Tensor], act: Callable[[], Any]) -> None:
    """`act` ends in a finalize; if it does not raise SyncError, the gradients must be the expected ones."""
    try:
        act()
    except SyncError:
        return
    assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_a_training_forward_between_finish_grad_sync_and_finalize_loses_nothing(rank: int, world: int) -> None:
    """An evaluation without no_grad, for example."""
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        plain = copy.deepcopy(model)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        for step in range(2):
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, step).backward()
            ddp.finish_grad_sync()
            loss_of(ddp, rank, 50)
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (step,)))


@ranks(2)
def test_a_backward_between_finish_grad_sync_and_finalize_is_added_or_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        expected = mean_over_ranks(model, world, (0, 1))
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        loss_of(ddp, rank, 0).backward()
        ddp.finish_grad_sync()

        def more(ddp: DistributedDataParallel = ddp) -> None:
            loss_of(ddp, rank, 1).backward()
            finalize_model_grads([ddp])

        right_or_refused(ddp, expected, more)


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("models", [1, 2])
def test_a_step_goes_on_after_a_finalize_that_was_refused(rank: int, world: int, models: int, share: bool) -> None:
    """What arrives afterwards is neither lost nor added to what is reduced already."""
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        options = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": overlap}
        ddps = [wrap(make_net(seed=seed), share_host_memory=share, **options) for seed in range(models)]
        expected = [mean_over_ranks(ddp.module, world, (0, 1)) for ddp in ddps]
        for ddp in ddps:
            loss_of(ddp, rank, 0).backward()
        bias = ddps[0].module.first.bias
        bias.requires_grad_(rank == 1)
        with pytest.raises(SyncError, match="frozen on ranks"):
            finalize_model_grads(ddps)
        bias.requires_grad_(True)
        for ddp in ddps:
            loss_of(ddp, rank, 1).backward()
        finalize_model_grads(ddps)
        for ddp, wanted in zip(ddps, expected, strict=True):
            got = whole_grads(ddp)
            del got["first.bias"], wanted["first.bias"]  # whose gradients ended with the freeze
            assert_same(got, wanted)


@ranks(4)
def test_a_backward_onto_reduced_expert_gradients_is_added_or_refused(rank: int, world: int) -> None:
    """Reducing an expert's mean again divides it again, however the division is done."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    first, second = (expert_reference(world, 2, rank, step, lambda r, s: -1) for step in (0, 1))
    expected = {name: first[name] + second[name] for name in first}
    for average in (False, True):
        ddp = wrap(Experts(rank % 2), average_in_collective=average)
        expert_loss(ddp, rank, 0).backward()
        finalize_model_grads([ddp])

        def more(ddp: DistributedDataParallel = ddp) -> None:
            expert_loss(ddp, rank, 1).backward()
            finalize_model_grads([ddp])

        right_or_refused(ddp, expected, more)


@ranks(2)
def test_a_backward_that_fails_half_way_on_one_rank_can_be_dropped(rank: int, world: int) -> None:
    """Rank 1 has launched some buckets when its backward raises, rank 0 all of them."""
    parallel_state.initialize_model_parallel()

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("the user's own")

    for strategy, overlap in SETTINGS:
        model = make_net()
        plain = copy.deepcopy(model)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=1)
        for step in range(4):
            ddp.zero_grad_buffer()
            if step % 2:
                if rank == 1:
                    handle = ddp.module.second.weight.register_hook(fail)
                    with pytest.raises(ArithmeticError):
                        loss_of(ddp, rank, 7).backward()
                    handle.remove()
                else:
                    loss_of(ddp, rank, 7).backward()
                ddp.zero_grad_buffer()
            loss_of(ddp, rank, step).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (step,)))


@ranks(2)
@pytest.mark.parametrize("of", ["wrapper", "module"])
def test_a_change_of_dtype_after_the_wrap_is_refused_or_right(rank: int, world: int, of: str) -> None:
    """module.double() moves parameters and gradients out of the buffers."""
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net(torch.float32)
        expected = mean_over_ranks(model, world)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        try:
            (ddp if of == "wrapper" else ddp.module).double()
            loss_of(ddp, rank, 0).backward()
            finalize_model_grads([ddp])
        except (RuntimeError, ValueError):
            continue
        assert_same(whole_grads(ddp), expected, rtol=1e-5)
        if strategy == "no_shard":
            got = {name: param.grad for name, param in ddp.module.named_parameters()}
            assert_same(got, expected, rtol=1e-5)


@ranks(2)
def test_moves_that_change_nothing_are_harmless(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        expected = mean_over_ranks(model, world)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        for _ in range(2):
            ddp.zero_grad_buffer()
            ddp.to("cpu").double().eval().train()
            loss_of(ddp, rank, 0).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), expected)


@ranks(2)
@pytest.mark.parametrize("how", ["added", "replaced"])
def test_a_parameter_that_came_after_the_wrap_is_refused_by_name(rank: int, world: int, how: str) -> None:
    """It has no place in a buffer: every rank would train its own copy."""
    parallel_state.initialize_model_parallel()
    for strategy in ("no_shard", "optim", "optim_grads"):
        ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy)
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        ddp.zero_grad_buffer()
        if how == "added":
            ddp.module.third = nn.Sequential(ddp.module.third, nn.Linear(3, 3, dtype=torch.float64))
            name = "third.1.weight"
        else:
            ddp.module.second.weight = nn.Parameter(ddp.module.second.weight.detach().clone())
            name = "second.weight"
        loss_of(ddp, rank, 0).backward()
        with pytest.raises(SyncError, match=name):
            finalize_model_grads([ddp])


def _adapter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, 0.1, dtype=torch.float64), requires_grad=False)


class Adapted(nn.Module):
    """A layer with a low-rank adapter beside it, as peft injects it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = _adapter(2, base.in_features), _adapter(base.out_features, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def _come(model: nn.Module, how: str) -> str:
    """Give a wrapped model frozen parameters; the name of the first one that its loss uses."""
    if how == "module":
        model.third = Adapted(model.third)
        return "third.down"
    if how == "in a submodule":
        model.second.scale = _adapter(11)
        model.second.register_forward_hook(lambda module, _, output: output + module.scale)
        return "second.scale"
    model.norm.bias = _adapter(7)  # in the place of one that was frozen at the wrap
    return "norm.bias"


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("how", ["module", "in a submodule", "replaced"])
@pytest.mark.in_suite()
def test_what_came_frozen_after_the_wrap_and_is_unfrozen_is_refused_by_name(
    rank: int, world: int, strategy: str, how: str
) -> None:
    """An adapter that is added to a running training, and trained later: every rank would train its own copy."""
    parallel_state.initialize_model_parallel()
    model = make_net()
    model.norm.bias.requires_grad_(False)
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.01), [ddp])
    name = _come(model, how)
    train(ddp, optimizer, rank, 0, 1)  # frozen, it is a part of the model like others
    late = model.get_parameter(name).requires_grad_(True)
    torch_optimizer = torch.optim.SGD([late], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(ddp, rank, 2).backward()
        with pytest.raises(SyncError, match=rf"'{name}' was (added|exchanged).* requires_grad=True now"):
            finalize_model_grads([ddp])
    late.requires_grad_(False)
    torch_optimizer.zero_grad()
    train(ddp, optimizer, rank, 3)


@ranks(1)
def test_a_module_that_is_exchanged_after_the_wrap_is_freed(rank: int, world: int) -> None:
    """One without parameters may be exchanged, and can hold large buffers."""
    parallel_state.initialize_model_parallel()
    model = make_net()
    model.table = nn.BatchNorm1d(1000, affine=False)
    ddp = wrap(model)
    statistics = weakref.ref(model.table.running_mean)
    model.table = nn.Identity()
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])  # which looks at the model, and knows it as it is now from then on
    gc.collect()
    assert statistics() is None


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList([first, second])


def layers(seed: int) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))


class Stack(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = layers(seed)

    def forward(self, x: torch.Tensor, skipped: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = torch.tanh(layer(x))
        return x


def pair_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 10 * step)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    first, second = model.models
    return second(first(x, -1), (rank + step) % 5).pow(2).sum() * (1 + rank)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("rows", [9, 13])
@pytest.mark.in_suite()
def test_a_parameter_that_is_resized_after_the_wrap_is_named(rank: int, world: int, strategy: str, rows: int) -> None:
    """As resize_token_embeddings does it: the same parameter, with other memory, after a step."""
    parallel_state.initialize_model_parallel()
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 3)).double()
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    ids = torch.arange(8) + rank
    ddp(ids).sum().backward()
    finalize_model_grads([ddp])
    with pytest.raises(SyncError, match=rf"'0.weight' is \[{rows}, 4\] now and was \[11, 4\] when"):
        with ddp.gathered():
            model[0].weight.data = torch.ones(rows, 4, dtype=torch.float64)
        ddp(ids)


@ranks(2)
def test_a_module_in_the_memory_of_the_one_it_replaces_is_noticed(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    ddp = wrap(model)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    del model.third  # no one holds it any more, and Python gives its place to the next module
    model.third = nn.Linear(11, 3).double()
    ddp.zero_grad_buffer()
    loss_of(ddp, rank, 1).backward()
    with pytest.raises(SyncError, match=r"'third\.weight' was exchanged for another one"):
        finalize_model_grads([ddp])


@ranks(3)
@pytest.mark.parametrize("finalize", ["together", "apart"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.in_suite()
def test_two_wrapped_models_in_one_loss_do_not_mix_their_buckets(
    rank: int, world: int, finalize: str, strategy: str
) -> None:
    """An encoder and a decoder: one group, and each rank skips another layer of one of them."""
    parallel_state.initialize_model_parallel()
    plain = Pair(Stack(1), Stack(2))
    options: dict[str, Any] = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": True}
    wrapped = [wrap(copy.deepcopy(model), bucket_size=1, **options) for model in plain.models]
    for step in range(5):
        for ddp in wrapped:
            ddp.zero_grad_buffer()
        pair_loss(Pair(*wrapped), rank, step).backward()
        if finalize == "together":
            finalize_model_grads(wrapped)
        else:
            for ddp in wrapped:
                finalize_model_grads([ddp])
        expected = mean_over_ranks(plain, world, (step,), pair_loss)
        got = {f"models.{n}.{name}": g for n, ddp in enumerate(wrapped) for name, g in whole_grads(ddp).items()}
        assert_same(got, expected)


@ranks(2)
def test_a_model_that_is_frozen_whole_for_a_while(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        model = make_net()
        expected = mean_over_ranks(model, world)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
        for step in range(5):
            frozen = step in (1, 2)
            ddp.module.requires_grad_(not frozen)
            ddp.zero_grad_buffer()
            value = loss_of(ddp, rank, 0)
            assert value.requires_grad != frozen
            if not frozen:
                value.backward()
            finalize_model_grads([ddp])
            zeros = {name: torch.zeros_like(grad) for name, grad in expected.items()}
            assert_same(whole_grads(ddp), zeros if frozen else expected, moved=not frozen)


@ranks(2)
@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.Adagrad])
def test_torch_optimizers_step_on_fp32_gradients_of_bf16_parameters(rank: int, world: int, build: Any) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net(torch.bfloat16)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    ddp = wrap(model, grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    optimizer = build(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        finalize_model_grads([ddp])
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        assert all(param.grad.dtype == torch.float32 for param in ddp.parameters())
        optimizer.step()
    assert all(torch.isfinite(param).all() for param in ddp.parameters())
    assert any(not torch.equal(param, start[name]) for name, param in ddp.module.named_parameters())

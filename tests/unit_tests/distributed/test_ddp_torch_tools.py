"""Standard torch tools work on the gradients: optimizers, clipping, the loss scaler, sparse embeddings."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, batch, loss_of, make_net, mean_over_ranks, whole_grads, wrap

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
}


def one_process_step(plain: nn.Module, optimizer: torch.optim.Optimizer, world: int, step: int, clip: float) -> None:
    optimizer.zero_grad()
    for rank in range(world):
        (loss_of(plain, rank, step) / world).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
    optimizer.step()


@ranks(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("zero", ["set_to_none", "keep", "buffer"])
@pytest.mark.in_suite()
def test_five_steps_of_training_equal_one_process(rank: int, world: int, name: str, zero: str) -> None:
    parallel_state.initialize_model_parallel()
    for overlap in (False, True):
        for clip in (0.0, 1.0):
            model = make_net()
            plain = copy.deepcopy(model)
            start = {name: param.detach().clone() for name, param in plain.named_parameters()}
            ddp = wrap(model, overlap_grad_reduce=overlap, bucket_size=30)
            optimizer, reference = OPTIMIZERS[name](ddp.parameters()), OPTIMIZERS[name](plain.parameters())
            for step in range(5):
                if zero == "buffer":
                    ddp.zero_grad_buffer()
                else:
                    optimizer.zero_grad(set_to_none=zero == "set_to_none")
                loss_of(ddp, rank, step).backward()
                finalize_model_grads([ddp])
                if clip:
                    torch.nn.utils.clip_grad_norm_(ddp.parameters(), clip)
                optimizer.step()
                one_process_step(plain, reference, world, step, clip)
            got = {name: param.detach() - start[name] for name, param in ddp.module.named_parameters()}
            assert_same(got, {name: p.detach() - start[name] for name, p in plain.named_parameters()}, rtol=1e-8)


@ranks(2)
def test_the_norm_that_clip_grad_norm_returns_is_the_norm_of_the_mean(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    expected = mean_over_ranks(model, world)
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    ddp = wrap(model, overlap_grad_reduce=True)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    got = torch.nn.utils.clip_grad_norm_(ddp.parameters(), norm.item() / 2)
    assert abs(got - norm) < 1e-9 * norm
    assert_same(whole_grads(ddp), {name: grad / 2 for name, grad in expected.items()}, rtol=1e-5)


@ranks(2)
def test_grad_scaler_unscales_and_skips_alike_on_all_ranks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net(torch.float32)
    plain = copy.deepcopy(model)
    ddp = wrap(model, overlap_grad_reduce=True, bucket_size=30)
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (ddp, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    start = {name: param.detach().clone() for name, param in plain.named_parameters()}
    for step in range(4):
        optimizer.zero_grad()
        value = scaler.scale(loss_of(ddp, rank, step))
        if step == 2 and rank == 1:
            value = value * float("inf")
        value.backward()
        finalize_model_grads([ddp])
        scaler.step(optimizer)
        scaler.update()
        if step != 2:  # every rank has skipped it, not rank 1 alone
            one_process_step(plain, reference, world, step, 0.0)
    assert scaler.get_scale() == 512.0
    got = {name: param.detach() - start[name] for name, param in ddp.module.named_parameters()}
    assert_same(got, {name: p.detach() - start[name] for name, p in plain.named_parameters()}, rtol=1e-4)


class Sparse(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.embedding = nn.Embedding(12, 4, sparse=sparse, dtype=torch.float64)
        self.output = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.embedding(tokens)))


def sparse_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 10 * step)
    tokens = torch.randint(0, 12, (6,), generator=generator)
    return model(tokens).pow(2).sum() * (1 + rank)


@ranks(2)
@pytest.mark.parametrize("zero", ["set_to_none", "buffer"])
def test_sparse_embedding_gradients_are_reduced(rank: int, world: int, zero: str) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in ("no_shard", "optim", "optim_grads"):
        for overlap in (False, True):
            ddp = wrap(Sparse(), data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=1)
            for step in range(3):
                if zero == "buffer":
                    ddp.zero_grad_buffer()
                else:
                    for param in ddp.parameters():
                        param.grad = None
                with ddp.no_sync():
                    sparse_loss(ddp, rank, 2 * step).backward()
                sparse_loss(ddp, rank, 2 * step + 1).backward()
                if step == 1:  # and a late one
                    sparse_loss(ddp, rank, 40).backward()
                finalize_model_grads([ddp])
                microbatches = (2 * step, 2 * step + 1, 40) if step == 1 else (2 * step, 2 * step + 1)
                expected = mean_over_ranks(Sparse(sparse=False), world, microbatches, sparse_loss)
                assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_autograd_grad_and_frozen_inputs_do_not_disturb_a_step(rank: int, world: int) -> None:
    """torch.autograd.grad fires no hooks and leaves gradients alone; a no_grad forward neither."""
    parallel_state.initialize_model_parallel()
    for strategy in ("no_shard", "optim", "optim_grads"):
        model = make_net()
        expected = mean_over_ranks(model, world)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=30)
        for _ in range(2):
            ddp.zero_grad_buffer()
            torch.autograd.grad(loss_of(ddp, rank, 7), list(ddp.parameters()))
            with torch.no_grad():
                loss_of(ddp, rank, 8)
            loss_of(ddp, rank, 0).backward()
            torch.autograd.grad(loss_of(ddp, rank, 9), list(ddp.parameters()))
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_gradient_penalty_through_create_graph(rank: int, world: int) -> None:
    """A loss with the norm of an input gradient in it: the second derivative reaches the parameters."""
    parallel_state.initialize_model_parallel()

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x, y = batch(rank, step)
        x.requires_grad_(True)
        value = (model(x) - y).pow(2).sum()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value + slope.pow(2).sum()

    for strategy in ("no_shard", "optim", "optim_grads"):
        model = make_net()
        expected = mean_over_ranks(model, world, (0,), loss)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=30)
        for _ in range(2):
            ddp.zero_grad_buffer()
            loss(ddp, rank, 0).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_state_dicts_have_the_modules_names_and_load_into_the_buffers(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in ("no_shard", "optim", "optim_grads"):
        ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy)
        other = make_net(seed=77)
        assert list(ddp.state_dict()) == list(other.state_dict())
        homes = [param.data_ptr() for param in ddp.parameters()]
        ddp.load_state_dict(other.state_dict())
        assert [param.data_ptr() for param in ddp.parameters()] == homes
        with pytest.raises(ValueError, match="assign=False"):
            ddp.load_state_dict(other.state_dict(), assign=True)
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), mean_over_ranks(other, world))


@ranks(2)
def test_hooks_of_the_users_own_see_their_gradients_and_may_change_them(rank: int, world: int) -> None:
    """A tensor hook runs before the accumulation, so what it returns is what is reduced."""
    parallel_state.initialize_model_parallel()
    for strategy in ("no_shard", "optim", "optim_grads"):
        model = make_net()
        expected = mean_over_ranks(model, world)
        model.second.weight.register_hook(lambda grad: 2 * grad)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=30)
        for _ in range(2):
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, 0).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), {**expected, "second.weight": 2 * expected["second.weight"]})


@ranks(1)
def test_buffers_gives_the_buffers_of_the_model_as_for_any_module(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    norm = nn.BatchNorm1d(3)
    ddp = wrap(norm)
    for mine, its in zip(ddp.buffers(), norm.buffers(), strict=True):
        assert mine is its
    assert len(list(ddp.buffers())) == 3 and not list(ddp.buffers(recurse=False))


def saved_bytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_the_state_dict_of_a_part_is_saved_without_the_rest(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 1)))
    plain[1].register_parameter("again", plain[1][0].weight)
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
    model = DistributedDataParallel(None, config, copy.deepcopy(plain))
    for part, reference in ((model.module[0], plain[0]), (model.module[1], plain[1])):
        with model.gathered():
            state, expected = part.state_dict(), reference.state_dict()
            assert abs(saved_bytes(state) - saved_bytes(expected)) <= 128  # of the file's padding; a tied weight once
            assert state.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in state.items())
            kept = part.state_dict(keep_vars=True)
            assert all(value is part.get_parameter(name) for name, value in kept.items())
    if strategy == "no_shard":  # a state dict of the whole follows the weights, as torch's does
        whole = model.module.state_dict()
        with torch.no_grad():
            model.module[0].bias.fill_(7.0)
        assert (whole["0.bias"] == 7).all()


@ranks(2)
def test_a_module_alone_is_wrapped_with_the_defaults(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    with pytest.raises(
        TypeError, match=r"was given \(Linear, NoneType, NoneType\).* DistributedDataParallel\(module=m"
    ):
        DistributedDataParallel(module)
    with pytest.raises(TypeError, match=r"was given \(NoneType, dict, Linear\)"):
        DistributedDataParallel(None, {}, module)  # type: ignore[arg-type]
    model = DistributedDataParallel(module=module)
    assert model.config is None and model.ddp_config == DistributedDataParallelConfig()
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    model(x).sum().backward()
    finalize_model_grads([model])
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[3.0 + 10, 5.0 + 10, 7.0 + 10]]  # the mean of both ranks' sums

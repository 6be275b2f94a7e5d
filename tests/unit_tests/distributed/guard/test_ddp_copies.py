"""A wrapped model and its wrapper can be copied, averaged, pickled and saved; the copy is plain, its values equal."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from core import parallel_state
from core.distributed import DistributedDataParallel, SyncError, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

STRATEGIES = ("no_shard", "optim", "optim_grads")


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved_and_loaded,
}


def train_a_step(ddp: DistributedDataParallel, rank: int, step: int) -> None:
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.01), ddp)
    ddp.zero_grad_buffer()
    loss_of(ddp, rank, step).backward()
    finalize_model_grads(ddp)
    assert optimizer.step()[0]


@ranks(2)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_the_model_is_plain_and_can_be_trained_and_wrapped(rank: int, world: int, how: str) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        start = make_net(torch.float32)
        ddp = wrap(copy.deepcopy(start), data_parallel_sharding_strategy=strategy)
        train_a_step(ddp, rank, 0)
        twin = COPIES[how](ddp.module)
        kept = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
        for name, param in twin.named_parameters():
            assert torch.equal(param, kept[name]) and not torch.equal(param, start.get_parameter(name))
            assert param.grad is None and not param._post_accumulate_grad_hooks
        # It trains as a plain model, which the wrapper neither sees nor hinders.
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
        loss_of(twin, rank, 1).backward()
        expected = mean_over_ranks(twin, 1, loss=lambda model, _, __: loss_of(model, rank, 1))
        assert_same({name: param.grad for name, param in twin.named_parameters()}, expected, rtol=1e-5)
        optimizer.step()
        assert all(torch.equal(param, kept[name]) for name, param in ddp.module.named_parameters())
        # And it may be wrapped like any other.
        again = wrap(COPIES[how](ddp.module), data_parallel_sharding_strategy=strategy)
        loss_of(again, rank, 2).backward()
        finalize_model_grads(again)
        assert_same(whole_grads(again), mean_over_ranks(ddp.module, world, (2,)), rtol=1e-5)


@ranks(2)
def test_an_average_of_the_model_is_torchs_average(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        ddp = wrap(make_net(torch.float32), data_parallel_sharding_strategy=strategy)
        average = AveragedModel(ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        expected: dict[str, torch.Tensor] = {}
        for step in range(3):
            train_a_step(ddp, rank, step)
            average.update_parameters(ddp.module)
            for name, param in ddp.module.named_parameters():
                now = param.detach().clone()
                expected[name] = 0.75 * expected[name] + 0.25 * now if step else now
        for name, param in average.module.named_parameters():
            torch.testing.assert_close(param, expected[name])
            assert (param - ddp.module.get_parameter(name)).abs().max() > 1e-4


@ranks(2)
@pytest.mark.parametrize("how", [*COPIES, "copy"])
@pytest.mark.in_suite(2)
def test_a_copy_of_the_wrapper_computes_the_same_and_training_goes_on_equal_to_the_bit(
    rank: int, world: int, how: str
) -> None:
    """For averages and evaluation. It keeps the tags of parameters, and nothing of what the engine made."""
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        weights: list[dict[str, torch.Tensor]] = []
        for copies in (False, True):
            ddp = wrap(make_net(torch.float32), data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True)
            ddp.module.first.weight.color = "blue"
            train_a_step(ddp, rank, 0)
            if copies:
                twin = {**COPIES, "copy": copy.copy}[how](ddp)
                assert isinstance(twin, DistributedDataParallel)
                assert set(vars(twin)) == {*vars(nn.Module()), "config", "ddp_config"}
                assert twin.ddp_config == ddp.ddp_config
                assert vars(twin.module.first.weight) == {"color": "blue"}
                with torch.no_grad():
                    value = loss_of(twin, rank, 5)
                    assert torch.equal(value, loss_of(ddp, rank, 5))
                    before = {name: param.clone() for name, param in twin.module.named_parameters()}
            for step in range(1, 3):
                train_a_step(ddp, rank, step)
            weights.append({name: param.detach().clone() for name, param in ddp.module.named_parameters()})
        for name, param in twin.module.named_parameters():
            assert torch.equal(weights[0][name], weights[1][name])
            assert torch.equal(param, before[name]) and not torch.equal(param, weights[1][name])
        # It is no model in training until it is wrapped again.
        for act in (lambda: loss_of(twin, rank, 0), twin.zero_grad_buffer, lambda: finalize_model_grads(twin)):  # noqa: B023
            with pytest.raises(SyncError, match=r"is a copy of a wrapped model.*copy\.module\)"):
                act()
        again = DistributedDataParallel(twin.config, twin.ddp_config, twin.module)
        loss_of(again, rank, 3).backward()
        finalize_model_grads(again)
        expected = make_net(torch.float32)
        expected.load_state_dict(before)
        assert_same(whole_grads(again), mean_over_ranks(expected, world, (3,)), rtol=1e-5)


@ranks(2)
def test_a_copy_of_a_copy_and_an_average_of_the_wrapper(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(torch.float32), data_parallel_sharding_strategy="optim")
    average = AveragedModel(copy.deepcopy(ddp), multi_avg_fn=get_ema_multi_avg_fn(0.75))
    start = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
    average.update_parameters(ddp)
    train_a_step(ddp, rank, 0)
    average.update_parameters(ddp)
    for name, param in average.module.module.named_parameters():
        now = ddp.module.get_parameter(name).detach()
        torch.testing.assert_close(param, 0.75 * start[name] + 0.25 * now)
        assert not torch.equal(param, start[name])
    loss_of(average.eval(), rank, 0)


@ranks(1)
def test_a_pickled_model_loads_in_a_process_that_has_started_no_group(rank: int, world: int, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(nn.Linear(3, 2), data_parallel_sharding_strategy="optim")
    ddp(torch.ones(1, 3)).sum().backward()
    finalize_model_grads(ddp)
    data = torch.arange(6.0).view(2, 3)
    torch.save([ddp, ddp.module, data, ddp(data).detach()], tmp_path / "both.pt")
    program = (
        "import sys, torch\n"
        "wrapped, plain, data, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "assert not torch.distributed.is_initialized()\n"
        "assert torch.equal(plain(data), expected)\n"
        "assert torch.equal(wrapped.eval()(data), expected)\n"
        "plain(data).sum().backward()\n"
        "assert plain.bias.grad.tolist() == [2.0, 2.0]\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "both.pt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Saving and loading the optimizer: training goes on bit for bit."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.distributed.contract.gradient_contract import GradientContract
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.masters.param_shards import ParamShard
from core.optimizer.optimizer_state import needed_part
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import Net, loss_of, make_net, wrap

STRATEGIES = ("no_shard", "optim")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.2, "sgd_momentum": 0.9, "weight_decay": 0.1},
    "adamw": {"optimizer": "adam", "lr": 0.05, "weight_decay": 0.1},
}


def build(model: Net, strategy: str, **options: Any) -> tuple[Any, Any]:
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=300, overlap_grad_reduce=True)
    return ddp, get_megatron_optimizer(OptimizerConfig(**options), [ddp])


def train(ddp: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        ddp.module.second.weight.requires_grad_(step != 1)  # its step count stays behind
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        finalize_model_grads([ddp])
        assert optimizer.step()[0]


def saved(*states: Any) -> list[Any]:
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return list(torch.load(file))


@ranks(1, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.in_suite()
def test_training_resumes_bit_for_bit(rank: int, world: int, strategy: str, algorithm: str, dtype: torch.dtype) -> None:
    parallel_state.initialize_model_parallel()
    options = ALGORITHMS[algorithm]
    ddp, optimizer = build(make_net(dtype, width=61), strategy, **options)
    train(ddp, optimizer, rank, range(3))
    optimizer.param_groups[0]["lr"] *= 0.5
    model_state, state = saved(ddp.state_dict(), optimizer.state_dict())
    train(ddp, optimizer, rank, range(3, 6))

    again, resumed = build(make_net(dtype, width=61), strategy, **options)
    again.load_state_dict(model_state)
    resumed.load_state_dict(state)
    train(again, resumed, rank, range(3, 6))
    start = make_net(dtype, width=61).state_dict()
    for name, value in ddp.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
        assert not torch.equal(value, start[name]), f"{name} did not move"


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_replicated_state_loads_into_shards(rank: int, world: int, dtype: torch.dtype) -> None:
    parallel_state.initialize_model_parallel()
    ddp, optimizer = build(make_net(dtype, width=61), "no_shard", **ALGORITHMS["adamw"])
    train(ddp, optimizer, rank, range(3))
    model_state, state = saved(ddp.state_dict(), optimizer.state_dict())
    train(ddp, optimizer, rank, range(3, 6))

    again, resumed = build(make_net(dtype, width=61), "optim", **ALGORITHMS["adamw"])
    again.load_state_dict(model_state)
    resumed.load_state_dict(state)
    train(again, resumed, rank, range(3, 6))
    tolerance = 1e-10 if dtype is torch.float64 else 2e-2
    for name, value in ddp.state_dict().items():
        assert torch.allclose(value, again.state_dict()[name], rtol=tolerance, atol=tolerance), name


@ranks(2)
def test_saving_before_the_first_step_and_loading_it(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp, optimizer = build(make_net(width=61), "optim", **ALGORITHMS["adamw"])
    state = saved(optimizer.state_dict())[0]
    train(ddp, optimizer, rank, range(2))
    again, resumed = build(make_net(width=61), "optim", **ALGORITHMS["adamw"])
    resumed.load_state_dict(state)
    train(again, resumed, rank, range(2))
    for name, value in ddp.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("masters", [{}, {"use_precision_aware_optimizer": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.in_suite()
def test_loading_its_own_state_changes_nothing(
    rank: int, world: int, strategy: str, masters: dict[str, Any], dtype: torch.dtype
) -> None:
    parallel_state.initialize_model_parallel()
    options = {**ALGORITHMS["adamw"], **masters}
    if dtype is torch.float16:
        options["loss_scale"] = 1.0
    if masters:
        options["main_grads_dtype"] = dtype
    ddp, optimizer = build(make_net(dtype, width=61), strategy, **options)
    train(ddp, optimizer, rank, range(3))
    before = copy.deepcopy(optimizer.state_dict())["state"]
    weights = copy.deepcopy(ddp.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())  # views of what is loaded into
    after = optimizer.state_dict()["state"]
    for name, entries in before.items():
        for entry, again in zip(entries, after[name], strict=True):
            assert entry.keys() == again.keys()
            for key, value in entry.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(again[key])), (name, key)
    for name, value in ddp.state_dict().items():
        assert torch.equal(value, weights[name]), name


@ranks(2)
def test_what_another_rank_saved_is_refused_and_changes_nothing(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp, optimizer = build(make_net(width=61), "optim", **ALGORITHMS["adamw"])
    train(ddp, optimizer, rank, range(2))
    states: list[Any] = [None, None]
    torch.distributed.all_gather_object(states, optimizer.state_dict())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="optimizer state (of|lacks) '"):
        optimizer.load_state_dict(states[1 - rank])
    after = optimizer.state_dict()
    assert before["state"].keys() == after["state"].keys()
    for name, entries in before["state"].items():
        for entry, other in zip(entries, after["state"][name], strict=True):
            assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(other[k])) for k, v in entry.items())


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reloaded_weights_reach_the_masters(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    ddp, optimizer = build(make_net(torch.bfloat16), strategy, **ALGORITHMS["sgd"])
    other = make_net(torch.bfloat16, seed=11)
    ddp.load_state_dict(other.state_dict())
    optimizer.reload_model_params()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(ddp, optimizer, rank, range(1))
    for name, value in ddp.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_an_entry_must_cover_the_slice_at_both_ends() -> None:
    shard = ParamShard(
        nn.Parameter(torch.zeros(10)), GradientContract("w", False, "dp_cp", 1), 0, start=0, end=4, offset=3
    )
    numbers = torch.arange(10.0)
    for first, last in ((3, 7), (0, 7), (3, 10), (0, 10)):
        entry = {"offset": first, "numel": last - first, "exp_avg": numbers[first:last], "step": torch.tensor(2.0)}
        part = needed_part("w", shard, entry)
        assert part["exp_avg"].tolist() == [3, 4, 5, 6]
        assert part["step"] == 2
    for first, last in ((4, 8), (0, 6), (4, 6), (8, 10)):
        saved = {"offset": first, "numel": last - first, "exp_avg": numbers[first:last]}
        message = rf"'w' covers elements \[{first}, {last}\) and this rank needs \[3, 7\)"
        with pytest.raises(ValueError, match=message):
            needed_part("w", shard, saved)
        with pytest.raises(ValueError, match=r"another bucket_size .* the bucket_size= of the run that saved it"):
            needed_part("w", shard, saved)

"""What of a checkpoint is taken, what is left, what is refused: small models, values, every rank the same message."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from core import parallel_state
from core.checkpoint import CheckpointError, CheckpointSaver, load_checkpoint, save_checkpoint
from core.checkpoint.algorithm_keys import keys_by_group
from core.checkpoint.optimizer_pieces import as_scalar
from core.checkpoint.pieces import Piece
from core.checkpoint.planners import PieceSavePlanner, check_coverage
from core.checkpoint.random_state import read_random_state, save_random_state, set_random_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from core.optimizer.optimizer_param_scheduler import OptimizerParamScheduler
from core.tensor_parallel import model_parallel_manual_seed
from core.tensor_parallel.random import MODEL_PARALLEL_STREAM, get_rng_tracker
from tests.unit_tests.ranks import ranks


class Net(nn.Module):
    """Every odd parameter: 0-dim, empty, frozen; and a buffer."""

    def __init__(self, width: int = 5, *, extra: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        if extra:
            self.third = nn.Linear(2, 2)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) * self.scale + self.frozen.sum() + self.empty.sum()


def build(
    net: nn.Module | None = None, *, strategy: str = "no_shard", **options: Any
) -> tuple[DistributedDataParallel, Any]:
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    net = Net() if net is None else net
    ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(None, ddp_config, net)
    bf16 = next(net.parameters()).dtype is torch.bfloat16
    return model, get_megatron_optimizer(OptimizerConfig(**{"lr": 0.1, "bf16": bf16, **options}), [model])


def train(model: DistributedDataParallel, optimizer: Any, steps: int, first: int = 0) -> None:
    dtype = next(model.module.parameters()).dtype
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model.zero_grad_buffer()
        model(torch.randn(3, 4, generator=generator).to(dtype)).square().mean().backward()
        finalize_model_grads([model])
        assert optimizer.step()[0]


def weights(model: DistributedDataParallel) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def flat_state(optimizer: Any) -> list[Any]:
    """All of the optimizer's state on this rank, in an order that does not change."""
    return [
        (name, key, torch.as_tensor(value).tolist())
        for name, held in optimizer.state_by_parameter().items()
        for entry in held
        for key, value in sorted(entry.items())
    ]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def refused(root: Path, model: DistributedDataParallel, optimizer: Any = None, **options: Any) -> str:
    """The message, the same on every rank; and nothing has changed."""
    before = weights(model)
    state = [] if optimizer is None else flat_state(optimizer)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(root, [model], optimizer, **options)
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, str(caught.value))
    assert len(set(messages)) == 1
    assert same(weights(model), before), "the model was changed by a load that was refused"
    if optimizer is not None:
        assert flat_state(optimizer) == state, "the optimizer was changed by a load that was refused"
    return str(caught.value)


# -- tensors that do not fit -----------------------------------------------------------------------------------------


@ranks(2)
def test_a_file_that_is_not_this_model_is_refused_on_all_ranks_before_anything_changes(
    rank: int, world: int, tmp_path: Path
) -> None:
    model, optimizer = build(strategy="optim")
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, 1, [model], optimizer)

    bigger, its_optimizer = build(Net(extra=True), strategy="optim")
    message = refused(tmp_path, bigger, its_optimizer)
    assert "lacks 'model.third.weight'" in message and "step_00000001" in message and "Nothing was changed" in message
    wider, its_optimizer = build(Net(width=6), strategy="optim")
    assert "'model.first.weight' has shape [5, 4] in the checkpoint and [6, 4] in this model" in refused(
        tmp_path, wider, its_optimizer
    )
    save_checkpoint(tmp_path, 2, [bigger])
    assert "the checkpoint has 'model.third.bias', which this model has not" in refused(tmp_path, model, optimizer)


@ranks(2)
def test_without_strict_what_both_have_is_loaded_and_the_rest_is_named(rank: int, world: int, tmp_path: Path) -> None:
    model, optimizer = build(strategy="optim")
    train(model, optimizer, 2)
    save_checkpoint(tmp_path, 1, [model], optimizer)
    bigger, its_optimizer = build(Net(extra=True), strategy="optim")
    third = bigger.module.third.weight.detach().clone()
    report = load_checkpoint(tmp_path, [bigger], its_optimizer, strict=False)
    assert sorted(report.notes) == [
        "the checkpoint lacks 'model.third.bias'",
        "the checkpoint lacks 'model.third.weight'",
    ]
    found = weights(bigger)
    assert all(torch.equal(found[name], value) for name, value in weights(model).items())
    assert torch.equal(bigger.module.third.weight, third)
    first = bigger.module.first.weight.detach().clone()
    train(bigger, its_optimizer, 1)
    assert not torch.equal(bigger.module.first.weight, first)
    assert torch.equal(bigger.module.third.weight, third)  # no forward uses it
    report = load_checkpoint(tmp_path, [model], optimizer)
    save_checkpoint(tmp_path, 2, [bigger], its_optimizer)
    report = load_checkpoint(tmp_path, [model], optimizer, strict=False)
    assert [note for note in report.notes if "third.weight" in note] == [
        "the checkpoint has 'model.third.weight', which this model has not"
    ]


@ranks(2)
def test_what_cannot_be_saved_is_refused_on_all_ranks_before_a_directory_exists(
    rank: int, world: int, tmp_path: Path
) -> None:
    model, optimizer = build()
    for options, words in [
        ({"extra": {"position": model}}, "extra cannot be written as JSON"),
        ({"extra": {"position": {1, 2}} if rank == 1 else {}}, "rank 1.*extra cannot be written as JSON"),
        ({"configuration": {"dtype": torch.float32}}, "configuration cannot be written as JSON"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            save_checkpoint(tmp_path, 1, [model], optimizer, **options)
    with pytest.raises(CheckpointError, match="""extra is '{"at": 0}' on rank 0 and '{"at": 1}' on rank 1"""):
        save_checkpoint(tmp_path, 1, [model], optimizer, extra={"at": rank})
    with pytest.raises(CheckpointError, match=r"optimizer is a SGD, whose state has no names"):
        save_checkpoint(tmp_path, 1, [model], torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"expected a list of this rank's chunks"):
        save_checkpoint(tmp_path, 1, model, optimizer)
    with pytest.raises(CheckpointError, match=r"global name 'scale'.*chunk 0.*chunk 1"):
        save_checkpoint(tmp_path, 1, [model, build(Net())[0]])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("step_")]


# -- algorithms, hyperparameters -------------------------------------------------------------------------------------


@ranks(2)
def test_state_of_another_algorithm_is_left_out_and_said(rank: int, world: int, tmp_path: Path) -> None:
    adam_model, adam = build(strategy="optim")
    train(adam_model, adam, 2)
    save_checkpoint(tmp_path, 1, [adam_model], adam)

    model, sgd = build(strategy="optim", optimizer="sgd")
    report = load_checkpoint(tmp_path, [model], sgd)
    assert same(weights(model), weights(adam_model))
    assert any("sgd" in note and "['exp_avg', 'exp_avg_sq', 'step']" in note for note in report.notes)
    reference, its_sgd = build(strategy="optim", optimizer="sgd")
    reference.module.load_state_dict(weights(adam_model))
    its_sgd.reload_model_params()
    train(model, sgd, 2)
    train(reference, its_sgd, 2)
    assert same(weights(model), weights(reference)), "momentum starts fresh"

    save_checkpoint(tmp_path, 2, [model], sgd)
    report = load_checkpoint(tmp_path, [adam_model], adam)
    assert any("keeps" in note and "['momentum_buffer']" in note and "fresh" in note for note in report.notes)
    train(adam_model, adam, 1)  # with moments of zero: a first step of Adam is as long as the learning rate
    moved = (adam_model.module.first.bias - model.module.first.bias).abs()
    assert torch.allclose(moved[moved > 0], torch.tensor(0.1), rtol=1e-3)


@ranks(2)
def test_saved_before_the_first_step_is_loaded_as_it_was(rank: int, world: int, tmp_path: Path) -> None:
    model, optimizer = build(strategy="optim")
    save_checkpoint(tmp_path, 0, [model], optimizer)
    other, its_optimizer = build(Net(), strategy="optim")
    train(other, its_optimizer, 2)  # has state, and must lose it
    report = load_checkpoint(tmp_path, [other], its_optimizer)
    assert report.step == 0
    train(model, optimizer, 3)
    train(other, its_optimizer, 3)
    assert same(weights(model), weights(other))


@ranks(1)
def test_settings_are_those_of_the_new_optimizer_unless_asked_for(rank: int, world: int, tmp_path: Path) -> None:
    model, optimizer = build(weight_decay=0.3)
    train(model, optimizer, 2)
    save_checkpoint(tmp_path, 2, [model], optimizer)
    other, its_optimizer = build(Net(), lr=0.02, weight_decay=0.5, adam_beta1=0.8)
    load_checkpoint(tmp_path, [other], its_optimizer)
    decays = {group["weight_decay"] for group in its_optimizer.param_groups}
    assert {group["lr"] for group in its_optimizer.param_groups} == {0.02} and decays == {0.0, 0.5}
    load_checkpoint(tmp_path, [other], its_optimizer, load_hyperparameters=True)
    decays = {group["weight_decay"] for group in its_optimizer.param_groups}
    assert {group["lr"] for group in its_optimizer.param_groups} == {0.1} and decays == {0.0, 0.3}
    assert {tuple(group["betas"]) for group in its_optimizer.param_groups} == {(0.9, 0.999)}
    train(model, optimizer, 2)
    train(other, its_optimizer, 2)
    assert same(weights(model), weights(other))
    sgd_model, sgd = build(Net(), optimizer="sgd")
    assert "has the hyperparameters of ['adam'], expected ['sgd']" in refused(
        tmp_path, sgd_model, sgd, load_hyperparameters=True
    )


def scheduler_of(optimizer: Any, max_lr: float = 0.1, **options: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(optimizer, 0.0, max_lr, 0.01, 4, 20, "cosine", 0.0, 0.2, 10, "linear", **options)


@ranks(2)
def test_a_scheduler_goes_on_at_its_count_with_saved_or_new_numbers_or_refuses(
    rank: int, world: int, tmp_path: Path
) -> None:
    model, optimizer = build(strategy="optim")
    scheduler = scheduler_of(optimizer)
    train(model, optimizer, 2)
    scheduler.step(6)
    save_checkpoint(tmp_path, 2, [model], optimizer, scheduler)

    def resumed(**options: Any) -> tuple[list[tuple[float, float]], OptimizerParamScheduler]:
        other, its_optimizer = build(Net(), strategy="optim", lr=options.get("max_lr", 0.1))
        its_scheduler = scheduler_of(its_optimizer, **options)
        load_checkpoint(tmp_path, [other], its_optimizer, its_scheduler)
        its_scheduler.step(3)
        return [(group["lr"], group["weight_decay"]) for group in its_optimizer.param_groups], its_scheduler

    found, its_scheduler = resumed()
    scheduler.step(3)
    assert its_scheduler.num_steps == 9
    assert found == [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    slower, its_scheduler = resumed(
        max_lr=0.05, override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=False
    )
    expected = 0.01 + (0.05 - 0.01) * 0.5 * (1 + math.cos(math.pi * 5 / 16))
    assert its_scheduler.num_steps == 9 and [lr for lr, _ in slower] == pytest.approx([expected] * len(slower))

    other, its_optimizer = build(Net(width=5), strategy="optim", lr=0.05)
    its_scheduler = scheduler_of(its_optimizer, max_lr=0.05, use_checkpoint_opt_param_scheduler=False)
    message = refused(tmp_path, other, its_optimizer, scheduler=its_scheduler)
    assert "the scheduler refuses its state" in message and its_scheduler.num_steps == 0


@ranks(1)
def test_a_loss_scaler_that_refuses_leaves_the_scheduler_as_it_was(rank: int, world: int, tmp_path: Path) -> None:
    class Refusing:
        def state_dict(self) -> dict[str, float]:
            return {"scale": 8.0}

        def load_state_dict(self, state: Any) -> None:
            raise ValueError("not these numbers")

    model, optimizer = build()
    scheduler = scheduler_of(optimizer)
    scheduler.step(6)
    optimizer.grad_scaler = Refusing()
    save_checkpoint(tmp_path, 2, [model], optimizer, scheduler)
    scheduler.load_state_dict({**scheduler.state_dict(), "num_steps": 1})
    lrs = [group["lr"] for group in optimizer.param_groups]
    message = refused(tmp_path, model, optimizer, scheduler=scheduler)
    assert "the loss_scaler refuses its state: not these numbers" in message
    assert scheduler.num_steps == 1 and [group["lr"] for group in optimizer.param_groups] == lrs


@ranks(2)
def test_a_chain_of_optimizers_is_saved_under_the_names_of_both_models(rank: int, world: int, tmp_path: Path) -> None:
    def chain() -> tuple[list[DistributedDataParallel], ChainedOptimizer]:
        nets = [nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(3, 2))]
        for net, name in zip(nets, ("encoder", "decoder"), strict=True):
            torch.manual_seed(len(name))
            net.global_names = {"0": f"{name}.0"}
        pairs = [build(net, strategy="optim", lr=lr) for net, lr in zip(nets, (0.1, 0.02), strict=True)]
        return [model for model, _ in pairs], ChainedOptimizer([optimizer for _, optimizer in pairs])

    def steps(models: list[DistributedDataParallel], optimizer: ChainedOptimizer, first: int) -> None:
        for step in range(first, first + 2):
            optimizer.zero_grad()
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(7 * step + rank))
            models[1](models[0](inputs)).square().mean().backward()
            finalize_model_grads(models)
            assert optimizer.step()[0]

    models, optimizer = chain()
    steps(models, optimizer, 0)
    save_checkpoint(tmp_path, 2, models, optimizer)
    steps(models, optimizer, 2)
    others, its_optimizer = chain()
    assert load_checkpoint(tmp_path, others, its_optimizer).notes == ()
    steps(others, its_optimizer, 2)
    for model, other in zip(models, others, strict=True):
        assert same(weights(model), weights(other))


@ranks(2)
def test_a_parameter_that_was_frozen_when_saved_starts_fresh_and_is_named(
    rank: int, world: int, tmp_path: Path
) -> None:
    net = Net()
    net.second.requires_grad_(False)
    model, optimizer = build(net, strategy="optim")
    train(model, optimizer, 2)
    save_checkpoint(tmp_path, 2, [model], optimizer)
    other, its_optimizer = build(Net(), strategy="optim")
    report = load_checkpoint(tmp_path, [other], its_optimizer)
    (note,) = report.notes
    assert "no optimizer state of 'second.bias' (and 1 more)" in note or "of 'second.weight' (and 0 more)" in note
    before = other.module.second.bias.detach().clone()
    train(other, its_optimizer, 1)
    moved = (other.module.second.bias - before).abs()
    assert torch.allclose(moved, torch.tensor(0.1), rtol=1e-3), "a first step of Adam, without decay"
    steps = {n: float(e["step"]) for n, held in its_optimizer.state_by_parameter().items() for e in held}
    assert all(count == (1 if n.startswith("second") else 3) for n, count in steps.items())


def test_what_modules_keep_next_to_tensors_is_not_saved_and_said(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"amax": 3}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError("there is none")

    net = nn.Sequential(Scaled(2, 2))
    with pytest.warns(UserWarning, match=r"'0._extra_state' is no parameter or buffer, and is not saved"):
        save_checkpoint(tmp_path, 1, [net])
    load_checkpoint(tmp_path, [net])


@ranks(2)
def test_an_error_that_one_rank_alone_has_is_raised_on_all(rank: int, world: int, tmp_path: Path) -> None:
    model, optimizer = build()
    save_checkpoint(tmp_path, 1, [model], optimizer)
    if rank == 1:
        del optimizer.names
    with pytest.raises(CheckpointError, match=r"rank 1: cannot save step 2: AttributeError: .*names"):
        save_checkpoint(tmp_path, 2, [model], optimizer)
    with pytest.raises(CheckpointError, match=r"rank 1: cannot load .*AttributeError: .*names"):
        load_checkpoint(tmp_path, [model], optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_of_another_format_is_refused_with_the_version_that_wrote_it(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    save_checkpoint(tmp_path, 1, [net])
    meta = {"content_format": 99, "versions": {"core": "7.1"}}
    with CheckpointSaver(tmp_path) as saver:
        saver.save(2, lambda writer: dcp.save({}, storage_writer=writer, no_dist=True), meta=meta)
    with pytest.raises(CheckpointError, match=r"format 99 and this version of the package reads 1.*version 7.1"):
        load_checkpoint(tmp_path, [net])
    assert load_checkpoint(tmp_path, [net], step=1).step == 1


@ranks(2)
def test_weights_alone_are_saved_and_loaded_without_an_optimizer(rank: int, world: int, tmp_path: Path) -> None:
    model, optimizer = build(strategy="optim")
    model.module.seen += 3 + rank  # as running statistics do; the first rank's are taken
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, 1, [model])
    other, its_optimizer = build(Net(width=5), strategy="optim")
    other.module.frozen.data += 1
    report = load_checkpoint(tmp_path, [other])
    model.module.seen.fill_(3)
    assert same(weights(other), weights(model)) and report.notes == ()
    report = load_checkpoint(tmp_path, [other], its_optimizer)
    assert report.notes == ("the checkpoint has no optimizer state: it starts fresh",)


# -- precisions ------------------------------------------------------------------------------------------------------


@ranks(2)
def test_masters_of_16_bit_weights_become_the_weights_of_a_full_precision_model_and_back(
    rank: int, world: int, tmp_path: Path
) -> None:
    low, low_optimizer = build(Net(dtype=torch.bfloat16), strategy="optim")
    train(low, low_optimizer, 3)
    save_checkpoint(tmp_path, 3, [low], low_optimizer)
    full, full_optimizer = build(strategy="no_shard")
    load_checkpoint(tmp_path, [full], full_optimizer)
    rounded = {name: value.to(low.module.state_dict()[name].dtype) for name, value in weights(full).items()}
    assert same(rounded, weights(low))
    assert not torch.equal(full.module.first.weight, low.module.first.weight.float()), "all digits of the masters"
    (moments,) = full_optimizer.state_by_parameter()["first.weight"]
    assert float(moments["step"]) == 3 and moments["exp_avg"].abs().max() > 0

    save_checkpoint(tmp_path, 4, [full], full_optimizer)
    back, back_optimizer = build(Net(dtype=torch.bfloat16), strategy="optim")
    load_checkpoint(tmp_path, [back], back_optimizer)
    assert flat_state(back_optimizer) == flat_state(low_optimizer)
    assert {key for _, key, _ in flat_state(back_optimizer)} >= {"master", "exp_avg", "exp_avg_sq", "step"}
    assert same(weights(back), weights(low))


@ranks(3)
def test_shards_of_nothing_but_padding_are_saved_and_loaded(rank: int, world: int, tmp_path: Path) -> None:
    net = nn.Linear(4, 1, bias=False)  # 4 elements, 3 shards of 128
    torch.manual_seed(3)
    net.weight.data.normal_()
    model, optimizer = build(net, strategy="optim")
    train(model, optimizer, 2)
    assert bool(optimizer.state_by_parameter()) == (rank == 0)
    save_checkpoint(tmp_path, 2, [model], optimizer)
    other, its_optimizer = build(nn.Linear(4, 1, bias=False), strategy="no_shard")
    load_checkpoint(tmp_path, [other], its_optimizer)
    train(model, optimizer, 2)
    train(other, its_optimizer, 2)
    assert torch.allclose(other.module.weight, model.module.weight, rtol=0, atol=0)


# -- asynchronous, parts of a job ------------------------------------------------------------------------------------


@ranks(2)
def test_an_asynchronous_save_holds_what_was_there_when_it_was_called(rank: int, world: int, tmp_path: Path) -> None:
    model, optimizer = build(strategy="optim")
    train(model, optimizer, 2)
    expected = weights(model)
    with CheckpointSaver(tmp_path, asynchronous=True) as saver:
        save_checkpoint(tmp_path, 2, [model], optimizer, saver=saver)
        for param in model.module.parameters():
            param.data.zero_()
        train(model, optimizer, 1)
        saver.wait()
    other, its_optimizer = build(Net(), strategy="optim")
    load_checkpoint(tmp_path, [other], its_optimizer)
    assert same(weights(other), expected)


@ranks(2)
def test_parameters_that_were_gathered_within_the_step_are_saved(rank: int, world: int, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim", overlap_grad_reduce=True, overlap_param_gather=True
    )
    model = DistributedDataParallel(None, config, Net())
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    train(model, optimizer, 2)
    save_checkpoint(tmp_path, 2, [model], optimizer)
    other, its_optimizer = build(Net(), strategy="optim")
    load_checkpoint(tmp_path, [other], its_optimizer)
    assert same(weights(other), weights(model))


# -- random streams --------------------------------------------------------------------------------------------------


def draw_all() -> list[float]:
    with get_rng_tracker().fork(MODEL_PARALLEL_STREAM):
        tracked = float(torch.rand(()))
    return [random.random(), float(np.random.randn()), float(torch.rand(())), tracked]


@ranks(1)
def test_every_random_stream_goes_on_where_it_stood(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model_parallel_manual_seed(3)
    np.random.randn()  # leaves a second normal number in numpy's pocket
    blob = save_random_state()
    expected = [draw_all() for _ in range(3)]
    model_parallel_manual_seed(4)
    random.seed(5)
    np.random.seed(6)
    assert all(mine != theirs for mine, theirs in zip(draw_all(), expected[0], strict=True))
    set_random_state(read_random_state(blob))
    assert [draw_all() for _ in range(3)] == expected


@ranks(2)
def test_streams_come_back_rank_by_rank_on_the_same_layout_and_stay_on_another(
    rank: int, world: int, tmp_path: Path
) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model, _ = build()
    model_parallel_manual_seed(3)
    random.seed(rank)
    save_checkpoint(tmp_path, 1, [model])
    expected = draw_all()
    report = load_checkpoint(tmp_path, [model])
    assert report.random_restored and draw_all() == expected
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, expected)
    assert everybody[0][0] != everybody[1][0] and everybody[0][3] != everybody[1][3]
    report = load_checkpoint(tmp_path, [model], load_random_state=False)
    assert not report.random_restored and draw_all() != expected

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    model, _ = build()
    random.seed(77)
    report = load_checkpoint(tmp_path, [model])
    assert not report.random_restored and random.random() == random.Random(77).random()


# -- the plan, without processes -------------------------------------------------------------------------------------


def items(*pieces: tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> Any:
    made = [Piece(key, shape, offset, torch.zeros(size)) for key, shape, offset, size in pieces]
    return PieceSavePlanner(made, {}).create_local_plan().items


def test_tensors_are_covered_once_and_every_refusal_names_tensor_and_ranks() -> None:
    whole = ("model.w", (4, 3))
    check_coverage([items((*whole, (0, 0), (2, 3))), items((*whole, (2, 0), (2, 1)), (*whole, (2, 1), (2, 2)))])
    check_coverage([items(("model.s", (), (), ())), items(("model.e", (0, 3), (0, 0), (0, 3)))])
    with pytest.raises(ValueError, match=r"ranks 0 and 2 both write a part of 'model.w'.*global_names"):
        check_coverage([items((*whole, (0, 0), (3, 3))), [], items((*whole, (2, 0), (2, 3)))])
    with pytest.raises(ValueError, match=r"'model.w' has 12 elements \[4, 3\] and ranks \[1\] write 9"):
        check_coverage([[], items((*whole, (0, 0), (3, 3)))])
    with pytest.raises(ValueError, match=r"is \[4, 3\] torch.float32 for rank 0 and \[4, 2\] torch.float32 for rank 1"):
        check_coverage([items((*whole, (0, 0), (4, 3))), items(("model.w", (4, 2), (0, 0), (4, 2)))])
    with pytest.raises(ValueError, match=r"'model.s' has 1 elements \[\] and ranks \[0, 1\] write 2"):
        check_coverage([items(("model.s", (), (), ())), items(("model.s", (), (), ()))])
    blobs = [PieceSavePlanner([], {"rng.x": b"1"}).create_local_plan().items for _ in range(2)]
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] all write 'rng.x'"):
        check_coverage(blobs)


def test_overlaps_are_found_among_many_chunks() -> None:
    rows = [items(("w", (6, 5), (row, column), (1, 1))) for row in range(6) for column in range(5)]
    check_coverage(rows)
    rows[7] = items(("w", (6, 5), (1, 1), (1, 1)))  # instead of (1, 2), so the volume is still right
    with pytest.raises(ValueError, match="ranks 6 and 7 both write"):
        check_coverage(rows)


@pytest.mark.parametrize(
    ("make", "kept", "scalars"),
    [
        (lambda p: torch.optim.Adam(p), {"step", "exp_avg", "exp_avg_sq"}, {"step"}),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"step"}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer"}, set()),
        (lambda p: torch.optim.SGD(p, lr=0.1), set(), set()),
        (lambda p: torch.optim.NAdam(p), {"step", "mu_product", "exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
    ],
)
def test_an_algorithm_is_asked_for_its_keys_without_touching_it(make: Any, kept: set[str], scalars: set[str]) -> None:
    param = nn.Parameter(torch.ones(3))
    inner = make([param])
    inner.register_step_pre_hook(lambda *_: pytest.fail("a user's hook heard of it"))
    (keys,) = keys_by_group(inner)
    assert keys is not None and (keys.kept, keys.scalars) == (kept, scalars)
    assert torch.equal(param, torch.ones(3)) and not inner.state and param.grad is None


def test_numbers_are_stored_exactly() -> None:
    for value in (0.1, 2**40 + 1, True, torch.tensor(3.0)):
        assert as_scalar(value).item() == (value.item() if isinstance(value, Tensor) else value)


@ranks(2)
def test_the_layout_says_that_the_optimizer_was_sharded_by_either_name(rank: int, world: int, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()
    for options, strategy in (
        ({}, "no_shard"),
        ({"use_distributed_optimizer": True}, "optim"),
        ({"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim_grads"}, "optim_grads"),
    ):
        model = DistributedDataParallel(None, DistributedDataParallelConfig(**options), nn.Linear(3, 2))
        save_checkpoint(tmp_path / strategy, 1, [model])
        assert load_checkpoint(tmp_path / strategy, [model]).layout["strategy"] == strategy

"""What a schedule has written into param groups goes on after a resume: rates, betas, momentum, keys of its own."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from core.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from core.distributed import finalize_model_grads
from core.gradient_accumulation import accumulate_gradient
from core.optimizer import OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, wrap

STEPS, STOP = 8, 3


class Decay(LRScheduler):
    """A schedule of a user's, over weight decay, with a number of its own in the groups."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = group["weight_decay"] * 0.5
            group["halved"] = group.get("halved", 0) + 1
        return [group["lr"] for group in self.optimizer.param_groups]


SCHEDULES: dict[str, tuple[str, Callable[[Any], LRScheduler]]] = {
    "one cycle, betas": ("adam", lambda opt: OneCycleLR(opt, max_lr=0.05, total_steps=STEPS + 2)),
    "one cycle, momentum": ("sgd", lambda opt: OneCycleLR(opt, max_lr=0.05, total_steps=STEPS + 2)),
    "cyclic, betas": ("adam", lambda opt: CyclicLR(opt, 0.01, 0.05, step_size_up=4)),
    "a user's": ("adam", Decay),
}


class Job:
    """Our optimizer under one of torch's schedules."""

    def __init__(self, schedule: str, seed: int, strategy: str = "optim") -> None:
        algorithm, make = SCHEDULES[schedule]
        torch.manual_seed(seed)
        self.module = make_net(torch.float32, width=19)
        with torch.no_grad():
            self.module.first.weight += 0.01 * seed
        self.model = wrap(self.module, data_parallel_sharding_strategy=strategy)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer=algorithm, lr=0.01, weight_decay=0.1), [self.model]
        )
        self.scheduler = make(self.optimizer.optimizer)

    def train(self, rank: int, steps: range) -> list[float]:
        """The loss of each step, and what it was stepped with."""
        seen = []
        for step in steps:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, rank, step)
            loss.backward()
            finalize_model_grads([self.model])
            group = next(group for group in self.optimizer.param_groups if group["wd_mult"])
            seen += [loss.item(), group["lr"], group["weight_decay"], *group.get("betas", [group.get("momentum")])]
            assert self.optimizer.step()[0]
            self.scheduler.step()
        return seen

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.module.parameters()]


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def unbroken(rank: int, schedule: str, strategy: str) -> tuple[list[float], list[Tensor]]:
    job = Job(schedule, 0, strategy)
    seen = job.train(rank, range(STEPS))
    per_step = len(seen) // STEPS
    assert len(set(seen[3::per_step] + seen[2::per_step])) > 2, "the schedule moves the learning rate alone"
    return seen[STOP * per_step :], job.weights()


def assert_resumed(rank: int, job: Job, want: tuple[list[float], list[Tensor]]) -> None:
    assert job.train(rank, range(STOP, STEPS)) == want[0]
    assert all(map(torch.equal, job.weights(), want[1]))


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("by", ["state_dict", "checkpoint"])
@pytest.mark.in_suite()
def test_a_resumed_run_equals_the_unbroken_one(
    rank: int, world: int, schedule: str, strategy: str, by: str, tmp_path: Path
) -> None:
    parallel_state.initialize_model_parallel()
    want = unbroken(rank, schedule, strategy)
    job, again = Job(schedule, 0, strategy), Job(schedule, 1, strategy)
    job.train(rank, range(STOP))
    if by == "checkpoint":
        save_checkpoint(tmp_path, STOP, [job.model], job.optimizer, job.scheduler)
        load_checkpoint(tmp_path, [again.model], again.optimizer, again.scheduler)
    else:
        targets = again.model, again.optimizer, again.scheduler
        for source, target in zip((job.model, job.optimizer, job.scheduler), targets, strict=True):
            target.load_state_dict(through_a_file(source.state_dict()))
    assert_resumed(rank, again, want)


@ranks(1)
def test_the_wrappers_of_accumulation_resume_a_schedule(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()

    def train(job: Job, wrapped: tuple[Any, ...], steps: range) -> list[Any]:
        optimizer, _, _, scheduler = wrapped
        for step in steps:
            for half in range(2):
                optimizer.backward(loss_of(job.model, rank, 2 * step + half))
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        return [*job.weights(), torch.tensor(job.optimizer.param_groups[0]["betas"])]

    jobs = [Job("one cycle, betas", seed) for seed in (0, 0, 1)]
    wraps = [accumulate_gradient(job.model, job.optimizer, [], 2, lr_scheduler=job.scheduler) for job in jobs]
    want = train(jobs[0], wraps[0], range(STEPS))
    train(jobs[1], wraps[1], range(STOP))
    jobs[2].model.load_state_dict(jobs[1].model.state_dict())
    for index in (0, 3):
        wraps[2][index].load_state_dict(through_a_file(wraps[1][index].state_dict()))
    assert all(map(torch.equal, train(jobs[2], wraps[2], range(STOP, STEPS)), want))


@ranks(1)
def test_what_no_schedule_has_written_stays_as_the_new_run_was_built(rank: int, world: int, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()
    job, again = Job("one cycle, betas", 0), Job("one cycle, betas", 1)
    job.train(rank, range(STOP))
    save_checkpoint(tmp_path, STOP, [job.model], job.optimizer, job.scheduler)
    for group in again.optimizer.param_groups:
        group["weight_decay"] = 0.7
    load_checkpoint(tmp_path, [again.model], again.optimizer, again.scheduler)
    assert {group["weight_decay"] for group in again.optimizer.param_groups} == {0.7}
    assert again.optimizer.param_groups[0]["betas"] == job.optimizer.param_groups[0]["betas"] != (0.95, 0.999)
    assert isinstance(again.optimizer.param_groups[0]["betas"], tuple)


@ranks(1)
def test_another_algorithm_goes_on_with_the_rate_alone(rank: int, world: int, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()
    job, again = Job("one cycle, betas", 0), Job("one cycle, momentum", 1)
    job.train(rank, range(STOP))
    save_checkpoint(tmp_path, STOP, [job.model], job.optimizer, job.scheduler)
    momentum = again.optimizer.param_groups[0]["momentum"]
    load_checkpoint(tmp_path, [again.model], again.optimizer, again.scheduler)
    group = again.optimizer.param_groups[0]
    assert group["lr"] == job.optimizer.param_groups[0]["lr"] and group["momentum"] == momentum
    assert "betas" not in group


class Refusing(Decay):
    def load_state_dict(self, state_dict: Any) -> None:
        raise ValueError("not this one")


@ranks(1)
def test_a_schedule_that_refuses_its_state_leaves_the_groups_as_they_were(
    rank: int, world: int, tmp_path: Path
) -> None:
    parallel_state.initialize_model_parallel()
    job, again = Job("one cycle, betas", 0), Job("a user's", 1)
    job.train(rank, range(STOP))
    save_checkpoint(tmp_path, STOP, [job.model], job.optimizer, job.scheduler)
    scheduler = Refusing(again.optimizer.optimizer)
    before = again.optimizer.state_dict()["param_groups"]
    with pytest.raises(CheckpointError, match="the scheduler refuses its state: not this one"):
        load_checkpoint(tmp_path, [again.model], again.optimizer, scheduler)
    assert again.optimizer.state_dict()["param_groups"] == before


# -- through the Booster -----------------------------------------------------------------------------------------------

PLUGINS: dict[str, Callable[[], Any]] = {
    "low level zero": lambda: LowLevelZeroPlugin(precision="fp32"),
    "torch ddp": TorchDDPPlugin,
}


def boosted(plugin: str, rate: Any = 0.01, factor: float = 1.0) -> tuple[Any, ...]:
    torch.manual_seed(3)
    model = nn.Linear(5, 3).double()
    with torch.no_grad():
        model.weight.mul_(factor)
    inner = torch.optim.Adam(model.parameters(), lr=rate)
    scheduler = OneCycleLR(inner, max_lr=rate * 5, total_steps=STEPS + 2)
    booster = Booster(plugin=PLUGINS[plugin]())
    model, optimizer, _, _, scheduler = booster.boost(model, inner, lr_scheduler=scheduler)
    return booster, model, optimizer, scheduler


def run(rank: int, job: tuple[Any, ...], steps: range) -> list[Tensor]:
    booster, model, optimizer, scheduler = job
    for step in steps:
        x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        booster.backward(model(x).pow(2).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [param.detach().clone() for param in model.unwrap().parameters()]


def save(job: tuple[Any, ...], folder: Path, *, shard: bool) -> None:
    booster, model, optimizer, scheduler = job
    booster.save_model(model, folder / "model")
    booster.save_optimizer(optimizer, folder / "optimizer", shard=shard)
    booster.save_lr_scheduler(scheduler, folder / "scheduler")


def load(job: tuple[Any, ...], folder: Path) -> None:
    booster, model, optimizer, scheduler = job
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    booster.load_lr_scheduler(scheduler, folder / "scheduler")


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("rate", [0.01, np.float64(0.01), np.float32(0.01)], ids=["float", "float64", "float32"])
@pytest.mark.in_suite()
def test_a_boosted_run_resumes_a_schedule_from_files(
    rank: int, world: int, plugin: str, shard: bool, rate: Any, tmp_path: Path
) -> None:
    want = run(rank, boosted(plugin, rate), range(STEPS))
    job, again = boosted(plugin, rate), boosted(plugin, rate, 2.0)
    run(rank, job, range(STOP))
    save(job, tmp_path, shard=shard)
    load(again, tmp_path)
    rounding = 1e-6 if type(rate) is np.float32 else 0.0  # the unbroken run computes its rates in numpy's fp32
    for found, wanted in zip(run(rank, again, range(STOP, STEPS)), want, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=rounding)


# -- numbers of numpy --------------------------------------------------------------------------------------------------


@ranks(1)
@pytest.mark.parametrize("number", [np.float64, np.float32])
def test_numbers_of_numpy_are_saved_as_numbers(rank: int, world: int, number: Any, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()

    def make(lr: Any) -> tuple[Any, Any]:
        model = wrap(make_net(torch.float32, width=19))
        config = OptimizerConfig(lr=lr, weight_decay=number(0.25))
        return model, get_megatron_optimizer(config, [model])

    model, optimizer = make(number(0.5))
    for group in optimizer.param_groups:
        group.update(betas=(number(0.75), 0.875), eps=number(0.125))
    state = through_a_file(optimizer.state_dict())
    save_checkpoint(tmp_path, 1, [model], optimizer, extra={"rate": 1.0})
    for load_into in (
        lambda model, optimizer: optimizer.load_state_dict(state),
        lambda model, optimizer: load_checkpoint(tmp_path, [model], optimizer, load_hyperparameters=True),
    ):
        again, loaded = make(0.1)
        load_into(again, loaded)
        group = next(group for group in loaded.param_groups if group["wd_mult"])
        found = [group["lr"], group["weight_decay"], group["betas"][0], group["eps"]]
        assert found == [0.5, 0.25, 0.75, 0.125] and all(type(value) is float for value in found)


@ranks(1)
def test_a_schedule_of_numpy_numbers_is_saved_in_a_checkpoint(rank: int, world: int, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()

    def make(rate: Any) -> tuple[Any, Any, Any]:
        model = wrap(make_net(torch.float32, width=19))
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=rate, min_lr=rate * 0), [model])
        scheduler = OptimizerParamScheduler(
            optimizer, init_lr=rate * 0, max_lr=rate, min_lr=rate * 0, lr_warmup_steps=0, lr_decay_steps=4,
            lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=0, wd_incr_style="constant",
        )  # fmt: skip
        return model, optimizer, scheduler

    model, optimizer, scheduler = make(np.float32(0.5))
    scheduler.step(1)
    save_checkpoint(tmp_path, 1, [model], optimizer, scheduler)
    again, loaded, resumed = make(0.5)
    load_checkpoint(tmp_path, [again], loaded, resumed)
    assert loaded.param_groups[0]["lr"] == 0.375 and through_a_file(scheduler.state_dict())["num_steps"] == 1


@ranks(1)
@pytest.mark.parametrize("accumulated", [False, True])
def test_state_dicts_of_wrappers_hold_no_numpy(rank: int, world: int, accumulated: bool) -> None:
    for plugin in PLUGINS:
        _, model, optimizer, _ = boosted(plugin, np.float64(0.01))
        if accumulated:
            optimizer, *_ = accumulate_gradient(model, optimizer, [], 2)
        optimizer.param_groups[0]["weight_decay"] = np.float32(0.5)
        state = through_a_file(optimizer.state_dict())
        assert state["param_groups"][0]["weight_decay"] == 0.5
        optimizer.load_state_dict(state)
        assert type(optimizer.param_groups[0]["weight_decay"]) is float

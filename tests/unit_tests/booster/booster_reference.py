"""What the Booster's tests train, and the same training on one process, in fp64, without any of ours."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from core.booster import Booster
from tests.unit_tests.reference import batch, make_net

STEPS = 5
MAX_NORM = 0.65
BOUNDS = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-2}


def new_model() -> nn.Module:
    """Sizes that no number of ranks divides."""
    return make_net(torch.float32)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, so that a plugin which mixes them up is found; SGD, which sees a wrong scale."""
    weights = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": weights, "lr": 0.2}, {"params": others, "lr": 0.45, "weight_decay": 0.01}]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.5)


def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean, so that the mean over ranks is the mean over the global batch."""
    return (outputs.to(targets.dtype) - 3 * targets).square().mean()


def own_loss(outputs: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = outputs.loss
    return loss


def one_backward(booster: Booster, model: Any, optimizer: Any, rank: int, microbatch: int = 0) -> None:
    inputs, targets = batch(rank, microbatch, torch.float32)
    booster.backward(mean_loss(model(inputs), targets), optimizer)


def sequence(mode: str, **options: Any) -> dict[str, Any]:
    return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode, **options}


def trained_on_one_process(
    world: int, accumulate: int, clip: bool, start: nn.Module | None = None
) -> tuple[nn.Module, list[float]]:
    """Five steps on the global batch. Returns the model in fp64 and the norms before clipping."""
    model = copy.deepcopy(new_model() if start is None else start).double()
    optimizer = new_optimizer(model)
    norms = []
    for step in range(STEPS):
        parts = [batch(rank, step * accumulate + m) for rank in range(world) for m in range(accumulate)]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        mean_loss(model(inputs), targets).backward()
        norms.append(float(nn.utils.get_total_norm([param.grad for param in model.parameters()])))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return model, norms


def train(
    booster: Booster,
    rank: int,
    accumulate: int = 1,
    clip: bool = False,
    *,
    model: nn.Module | None = None,
    steps: range = range(STEPS),
    sync_all: bool = False,
) -> tuple[nn.Module, Any, list[float]]:
    """Five steps with the Booster, as a user writes them. Returns (boosted model, boosted optimizer, norms)."""
    model = new_model() if model is None else model
    model, optimizer, criterion, _, _ = booster.boost(model, new_optimizer(model), mean_loss)
    norms = run_steps(booster, model, optimizer, criterion, rank, accumulate, clip, steps, sync_all=sync_all)
    return model, optimizer, norms


def run_steps(
    booster: Booster,
    model: nn.Module,
    optimizer: Any,
    criterion: Callable[..., torch.Tensor],
    rank: int,
    accumulate: int = 1,
    clip: bool = False,
    steps: range = range(STEPS),
    *,
    sync_all: bool = False,
) -> list[float]:
    norms = []
    for step in steps:
        optimizer.zero_grad()
        for m in range(accumulate):
            inputs, targets = batch(rank, step * accumulate + m, torch.float32)
            last = m == accumulate - 1 or sync_all
            with contextlib.nullcontext() if last else booster.no_sync(model, optimizer):
                booster.backward(criterion(model(inputs), targets) / accumulate, optimizer)
        if clip:
            norms.append(float(optimizer.clip_grad_by_norm(MAX_NORM)))
            assert optimizer.get_grad_norm() == norms[-1]
        optimizer.step()
    return norms


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The plain module's weights by name, gathered. Collective."""
    plain = model.unwrap() if hasattr(model, "unwrap") else model
    if hasattr(model, "gathered"):
        with model.gathered():
            return {name: param.detach().cpu().clone() for name, param in plain.named_parameters()}
    return {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().cpu()
        for name, param in plain.named_parameters()
    }


def assert_same_training(model: nn.Module, reference: nn.Module, bound: float, start: nn.Module | None = None) -> None:
    """Every weight within `bound`, of a reference that has moved by far more."""
    before = dict((new_model() if start is None else start).named_parameters())
    ours = full_weights(model)
    wanted = dict(reference.named_parameters())
    assert ours.keys() == wanted.keys()
    for name, want in wanted.items():
        torch.testing.assert_close(ours[name].double(), want, atol=bound, rtol=bound, msg=lambda m, n=name: f"{n}: {m}")
        moved = (want - before[name].double()).abs().max()
        assert moved > 1.2 * bound, f"{name} has moved by {moved} only, so equality says nothing"
    most = max((want - before[name].double()).abs().max() for name, want in wanted.items())
    assert most > 10 * bound, f"nothing has moved by more than {most}, so equality says little"

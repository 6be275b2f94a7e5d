"""Accumulated training against training on the whole batch, in fp64, with a large SGD step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from core.gradient_accumulation import (
    AccumulationError,
    GradAccumDataloader,
    GradAccumGradientHandler,
    GradAccumLrSchedulerByStep,
    GradAccumOptimizer,
    accumulate_gradient,
)
from core.gradient_accumulation.cycle import Accumulation
from core.gradient_handler import BaseGradientHandler
from tests.unit_tests.reference import make_net

LR = 0.3


def batches(count: int = 8, rows: int = 4, offset: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generators = [torch.Generator().manual_seed(100 + offset + i) for i in range(count)]
    return [
        (
            torch.randn(rows, 5, generator=g, dtype=torch.float64),
            torch.randn(rows, 3, generator=g, dtype=torch.float64),
        )
        for g in generators
    ]


def mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).pow(2).mean()


def joined(group: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([x for x, _ in group]), torch.cat([y for _, y in group])


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def large_batch(groups: list[list[Any]], max_norm: float | None = None) -> nn.Module:
    """The reference: one step with a halving rate for each group of microbatches."""
    model = make_net()
    optimizer = sgd(model)
    scheduler = halving(optimizer)
    for group in groups:
        optimizer.zero_grad()
        mean_loss(model, joined(group)).backward()
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            assert norm > 1.5 * max_norm, "nothing is clipped, so equality says nothing"
        optimizer.step()
        scheduler.step()
    return model


def assert_equal_models(model: nn.Module, reference: nn.Module, *, atol: float = 1e-10) -> None:
    start = make_net()
    for ours, want, before in zip(model.parameters(), reference.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(ours, want, rtol=0, atol=atol)
        assert (want - before).abs().max() > 1e-3, "the reference has hardly moved"


class Doubling(BaseGradientHandler):
    """Multiplies by two, so that a call too many or too few is seen."""

    calls = 0

    def handle_gradient(self) -> None:
        self.calls += 1
        for param in self._model.parameters():
            param.grad.mul_(2)


# -- equals the large batch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("max_norm", [None, 0.2])
def test_accumulated_training_equals_training_on_the_large_batch(
    size: int, zero_first: bool, max_norm: float | None
) -> None:
    model, data = make_net(), batches(8)
    inner = sgd(model)
    optimizer, loader, handlers, scheduler = accumulate_gradient(model, inner, data, size, lr_scheduler=halving(inner))
    assert handlers is None
    for batch in loader:
        if zero_first:
            optimizer.zero_grad()
        optimizer.backward(mean_loss(model, batch))
        if max_norm is not None:
            norm = optimizer.clip_grad_norm(model, max_norm)
            assert (norm is None) == (not optimizer.is_due)
            optimizer.clip_grad_by_norm(max_norm)
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        scheduler.step()
    groups = [data[i : i + size] for i in range(0, 8, size)]
    assert_equal_models(model, large_batch(groups, max_norm))
    assert scheduler.get_last_lr() == [LR / 2 ** (8 // size)]


@pytest.mark.parametrize("max_norm", [None, 0.2])
def test_microbatches_of_different_sizes_equal_the_large_batch_when_tokens_are_counted(max_norm: float | None) -> None:
    data = [batches(1, rows, offset=rows)[0] for rows in (1, 5, 2, 7, 3, 3)]
    model = make_net()
    inner = sgd(model)
    optimizer, loader, _, scheduler = accumulate_gradient(model, inner, data, 3, lr_scheduler=halving(inner))
    for batch in loader:
        optimizer.zero_grad()
        optimizer.backward((model(batch[0]) - batch[1]).pow(2).sum() / 3, num_tokens=len(batch[0]))
        if max_norm is not None:
            optimizer.clip_grad_norm(model, max_norm)
        optimizer.step()
        scheduler.step()
    assert_equal_models(model, large_batch([data[:3], data[3:]], max_norm))


@pytest.mark.parametrize("weight", [0.3, 0.015])
def test_tokens_may_weigh_less_than_one_each(weight: float) -> None:
    data = [batches(1, rows, offset=rows)[0] for rows in (1, 5, 2)]
    model = make_net()
    optimizer = GradAccumOptimizer(sgd(model), 3)
    for inputs, targets in data:
        weighted = (model(inputs) - targets).pow(2).sum() / 3 * weight
        optimizer.backward(weighted, num_tokens=torch.tensor(weight * len(inputs), dtype=torch.float64))
        optimizer.step()
    assert_equal_models(model, large_batch([data]))


def test_tokens_of_some_microbatches_only_are_refused() -> None:
    model = make_net()
    optimizer = GradAccumOptimizer(sgd(model), 4)
    optimizer.backward(mean_loss(model, batches(1)[0]), num_tokens=4)
    with pytest.raises(AccumulationError, match="for all of them or for none"):
        optimizer.backward(mean_loss(model, batches(1)[0]))


def test_a_given_gradient_is_not_scaled_because_its_loss_was() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = GradAccumOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    for _ in range(2):
        optimizer.backward_by_grad(weight * 3, torch.ones(2))
        optimizer.step()
    assert weight.tolist() == [-6.0, -6.0]


def test_a_given_gradient_counts_tokens_as_its_loss_does() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = GradAccumOptimizer(torch.optim.SGD([weight], lr=1.0), 2)
    for tokens in (1, 3):
        optimizer.backward_by_grad(weight * 4, torch.full((2,), float(tokens)), num_tokens=tokens)
        optimizer.step()
    assert weight.tolist() == [-4.0, -4.0]


# -- one state ------------------------------------------------------------------------------------------------------


def test_a_skipped_batch_leaves_optimizer_scheduler_and_handler_in_step() -> None:
    model, data = make_net(), batches(12)
    inner = sgd(model)
    handler = Doubling(model, inner)
    optimizer, loader, handlers, scheduler = accumulate_gradient(model, inner, data, 3, [handler], halving(inner))
    for number, batch in enumerate(loader):
        if number in (1, 5, 6):  # a bad batch
            continue
        optimizer.zero_grad()
        optimizer.backward(mean_loss(model, batch) / 2)
        handlers[0].handle_gradient()
        optimizer.step()
        scheduler.step()
    kept = [batch for number, batch in enumerate(data) if number not in (1, 5, 6)]
    assert handler.calls == 3
    assert_equal_models(model, large_batch([kept[:3], kept[3:6], kept[6:]]))


def test_a_second_backward_belongs_to_the_same_microbatch() -> None:
    model, data = make_net(), batches(8)
    inner = sgd(model)
    optimizer, loader, _, scheduler = accumulate_gradient(model, inner, data, 4, lr_scheduler=halving(inner))
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        optimizer.backward(0.25 * mean_loss(model, batch))
        assert optimizer.accumulate_step == number % 4 + 1
        optimizer.backward(0.75 * mean_loss(model, batch))
        assert optimizer.accumulate_step == number % 4 + 1
        optimizer.step()
        scheduler.step()
    assert_equal_models(model, large_batch([data[:4], data[4:]]))


def test_a_skipped_batch_and_a_second_backward_together_do_no_harm() -> None:
    model, data = make_net(), batches(8)
    inner = sgd(model)
    optimizer, loader, _, scheduler = accumulate_gradient(model, inner, data, 2, lr_scheduler=halving(inner))
    for number, batch in enumerate(loader):
        if number % 2:
            continue
        optimizer.zero_grad()
        optimizer.backward(0.5 * mean_loss(model, batch))
        optimizer.backward(0.5 * mean_loss(model, batch))
        optimizer.step()
        scheduler.step()
    assert_equal_models(model, large_batch([data[0:4:2], data[4:8:2]]))


def test_without_our_loader_every_backward_is_a_microbatch() -> None:
    model, data = make_net(), batches(4)
    inner = sgd(model)
    optimizer = GradAccumOptimizer(inner, 4, model)
    scheduler = GradAccumLrSchedulerByStep(halving(inner), 4, state=optimizer.accumulation)
    for batch in data:
        optimizer.backward(mean_loss(model, batch))
    optimizer.step()
    scheduler.step()
    assert_equal_models(model, large_batch([data]))


def test_a_step_may_be_left_out_where_none_is_due() -> None:
    model, data = make_net(), batches(4)
    inner = sgd(model)
    optimizer, loader, _, _ = accumulate_gradient(model, inner, data, 4)
    for batch in loader:
        optimizer.backward(mean_loss(model, batch))
    optimizer.step()
    assert_equal_models(model, large_batch([data]))


def test_a_step_that_is_due_cannot_be_missed() -> None:
    model = make_net()
    optimizer, loader, _, _ = accumulate_gradient(model, sgd(model), batches(4), 2)
    with pytest.raises(AccumulationError, match=r"2 microbatches are accumulated .* without optimizer.step\(\)"):
        for batch in loader:
            optimizer.backward(mean_loss(model, batch))
    optimizer.discard()
    assert all(param.grad is None for param in model.parameters()) and optimizer.accumulate_step == 0


def test_batches_drawn_ahead_without_steps_between_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = make_net()
    optimizer, loader, _, _ = accumulate_gradient(model, sgd(model), batches(4), 4)
    ahead = list(loader)
    with caplog.at_level(logging.WARNING):
        for batch in ahead:
            optimizer.backward(mean_loss(model, batch))
    assert "4 batches were drawn before several backwards" in caplog.text and len(caplog.records) == 1


def test_batches_drawn_ahead_are_microbatches_where_step_follows_each_backward() -> None:
    model, data = make_net(), batches(4)
    optimizer, loader, _, _ = accumulate_gradient(model, sgd(model), data, 4)
    for batch in list(loader):
        optimizer.backward(mean_loss(model, batch))
        optimizer.step()
    assert_equal_models(model, large_batch([data]))


def test_zero_grad_in_the_middle_of_a_cycle_does_nothing() -> None:
    model = make_net()
    optimizer = GradAccumOptimizer(sgd(model), 3, model)
    optimizer.backward(mean_loss(model, batches(1)[0]))
    optimizer.step()
    optimizer.zero_grad()
    assert model.third.weight.grad.norm() > 0


@pytest.mark.parametrize("max_norm", [0.0, -1.0])
def test_a_max_norm_of_zero_clips_nothing(max_norm: float) -> None:
    """ColossalAI's default of 0.0 set every gradient to zero."""
    model = make_net()
    optimizer = GradAccumOptimizer(sgd(model), 1, model)
    optimizer.backward(mean_loss(model, batches(1)[0]))
    before = model.third.weight.grad.clone()
    assert optimizer.clip_grad_norm(model, max_norm) is None
    assert torch.equal(model.third.weight.grad, before) and before.norm() > 0


@pytest.mark.parametrize("clip", ["clip_grad_norm", "clip_grad_by_norm"])
def test_neither_name_of_clipping_touches_a_partial_gradient(clip: str) -> None:
    model = make_net()
    optimizer = GradAccumOptimizer(sgd(model), 2, model)
    call = {
        "clip_grad_norm": lambda: optimizer.clip_grad_norm(model, 1e-6),
        "clip_grad_by_norm": lambda: optimizer.clip_grad_by_norm(1e-6),
    }[clip]
    optimizer.backward(mean_loss(model, batches(1)[0]))
    before = model.third.weight.grad.clone()
    assert call() is None and torch.equal(model.third.weight.grad, before)
    optimizer.backward(mean_loss(model, batches(1)[0]))
    assert call() > 0.1
    assert nn.utils.get_total_norm([p.grad for p in model.parameters()]) == pytest.approx(1e-6, rel=1e-3)


def test_an_optimizers_own_backward_and_clipping_are_used() -> None:
    class Own(torch.optim.SGD):
        said: list[Any] = []

        def backward(self, loss: torch.Tensor) -> None:
            self.said.append(loss.item())
            loss.backward()

        def clip_grad_by_norm(self, max_norm: float) -> None:
            self.said.append(max_norm)

    weight = nn.Parameter(torch.ones(1))
    optimizer = GradAccumOptimizer(Own([weight], lr=1.0), 2)
    for _ in range(2):
        optimizer.backward(weight.sum() * 8)
        optimizer.clip_grad_by_norm(7.0)
        optimizer.step()
    assert Own.said == [4.0, 4.0, 7.0]


class Skipping(torch.optim.SGD):
    """Says, as a mixed-precision optimizer does, that it did not update."""

    verdicts: list[bool] = []

    def step(self, closure: Any = None) -> Any:
        return self.verdicts.pop(0), None, None


def test_the_schedule_does_not_follow_a_step_that_the_optimizer_skipped() -> None:
    weight = nn.Parameter(torch.ones(1))
    inner = Skipping([weight], lr=1.0)
    inner.verdicts[:] = [False, True]
    state = Accumulation(2)
    optimizer = GradAccumOptimizer(inner, 2, state=state)
    scheduler = GradAccumLrSchedulerByStep(halving(inner), 2, state=state)
    rates = []
    for _ in range(4):
        optimizer.backward(weight.sum())
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 1.0, 1.0, 0.5]


def test_extra_calls_of_the_scheduler_change_nothing() -> None:
    model = make_net()
    inner = sgd(model)
    optimizer, loader, _, scheduler = accumulate_gradient(model, inner, batches(4), 2, lr_scheduler=halving(inner))
    for batch in loader:
        scheduler.step()
        optimizer.backward(mean_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [LR / 4] and scheduler.last_epoch == 2


# -- handlers -------------------------------------------------------------------------------------------------------


def test_a_handler_runs_once_a_cycle_on_the_whole_gradient() -> None:
    model, data = make_net(), batches(4)
    inner = sgd(model)
    handler = Doubling(model, inner)
    optimizer, loader, handlers, _ = accumulate_gradient(model, inner, data, 4, [handler])
    assert isinstance(handlers[0], BaseGradientHandler)
    for batch in loader:
        optimizer.backward(mean_loss(model, batch) / 2)
        handlers[0].handle_gradient()
        handlers[0].handle_gradient()
        optimizer.step()
    assert handler.calls == 1
    assert_equal_models(model, large_batch([data]))


def test_a_handler_that_was_not_called_stops_the_step() -> None:
    model = make_net()
    inner = sgd(model)
    optimizer, _, handlers, _ = accumulate_gradient(model, inner, [], 1, [Doubling(model, inner)] * 2)
    optimizer.backward(mean_loss(model, batches(1)[0]))
    handlers[0].handle_gradient()
    with pytest.raises(AccumulationError, match="1 of 2 gradient handlers did not run"):
        optimizer.clip_grad_norm(model, 1.0)
    with pytest.raises(AccumulationError, match="1 of 2 gradient handlers did not run"):
        optimizer.step()
    handlers[1].handle_gradient()
    optimizer.step()


def test_a_backward_after_the_reduction_is_refused() -> None:
    model = make_net()
    inner = sgd(model)
    optimizer, loader, handlers, _ = accumulate_gradient(model, inner, batches(1), 1, [Doubling(model, inner)])
    batch = next(iter(loader))
    optimizer.backward(mean_loss(model, batch))
    handlers[0].handle_gradient()
    with pytest.raises(AccumulationError, match="after this cycle's gradients were reduced"):
        optimizer.backward(mean_loss(model, batch))


def test_a_handler_alone_runs_on_every_nth_call() -> None:
    model = nn.Linear(1, 1)
    model(torch.ones(1)).sum().backward()
    handler = Doubling(model, None)
    alone = GradAccumGradientHandler(handler, 3)
    calls = []
    for _ in range(7):
        alone.handle_gradient()
        calls.append(handler.calls)
    assert calls == [0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("wrong", [None, object(), "nested"])
def test_only_handlers_are_wrapped_and_only_once(wrong: Any) -> None:
    if wrong == "nested":
        wrong = GradAccumGradientHandler(Doubling(nn.Linear(1, 1), None), 2)
    with pytest.raises(TypeError, match="expected grad_handler to be type BaseGradientHandler, but got"):
        GradAccumGradientHandler(wrong, 2)


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-2, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_size_that_is_no_count_is_refused_by_every_wrapper(size: Any, error: type[Exception]) -> None:
    model = make_net()
    optimizer = sgd(model)
    makers = (
        lambda: accumulate_gradient(model, optimizer, [], size),
        lambda: GradAccumOptimizer(optimizer, size),
        lambda: GradAccumDataloader([], size),
        lambda: GradAccumLrSchedulerByStep(halving(optimizer), size),
        lambda: GradAccumGradientHandler(Doubling(model, optimizer), size),
        lambda: GradAccumLrSchedulerByStep.compute_effective_steps_per_epoch([], size),
    )
    for make in makers:
        with pytest.raises(error, match="accumulate_size is"):
            make()


def test_wrappers_of_different_sizes_cannot_share_a_state() -> None:
    with pytest.raises(ValueError, match="3 here and 2"):
        GradAccumDataloader([], 3, state=Accumulation(2))


def test_handlers_come_in_a_list() -> None:
    model = make_net()
    with pytest.raises(TypeError, match="expected gradient_handlers to be a list, but got Doubling"):
        accumulate_gradient(model, sgd(model), [], 2, Doubling(model, None))  # type: ignore[arg-type]


def test_the_wrapper_is_an_optimizer_that_shows_the_inner_one() -> None:
    model = make_net()
    inner = sgd(model)
    optimizer = GradAccumOptimizer(inner, 2)
    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.param_groups is inner.param_groups
    scheduler = halving(optimizer)
    optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == LR / 2

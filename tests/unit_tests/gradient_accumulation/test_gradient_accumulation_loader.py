"""The loader and the scheduler of gradient accumulation, and training that resumes in a cycle."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from core.gradient_accumulation import (
    AccumulationError,
    GradAccumDataloader,
    GradAccumLrSchedulerByStep,
    GradAccumOptimizer,
    accumulate_gradient,
)
from tests.unit_tests.gradient_accumulation.test_gradient_accumulation import LR, batches, halving, mean_loss, sgd
from tests.unit_tests.reference import make_net

# -- the schedule ---------------------------------------------------------------------------------------------------


def test_a_scheduler_alone_steps_on_every_nth_call() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = GradAccumLrSchedulerByStep(halving(optimizer), 4)
    rates = []
    for _ in range(9):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) and scheduler.base_lrs == [1.0]

    resumed = GradAccumLrSchedulerByStep(halving(optimizer), 4)
    resumed.load_state_dict(scheduler.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25
    for _ in range(3):
        resumed.step()
    assert resumed.get_last_lr() == [0.125]


def test_updates_an_epoch_are_whole_cycles() -> None:
    assert GradAccumLrSchedulerByStep.compute_effective_steps_per_epoch(range(10), 4) == 2


# -- the loader -----------------------------------------------------------------------------------------------------


class Consumed:
    """Counts what is drawn, and whether its end was seen."""

    def __init__(self, items: Any, length: int) -> None:
        self.items, self.length = items, length
        self.drawn, self.ended = 0, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for item in self.items:
            self.drawn += 1
            yield item
        self.ended += 1


@pytest.mark.parametrize(("length", "size", "given"), [(10, 4, 8), (8, 4, 8), (3, 4, 0), (0, 4, 0), (5, 1, 5)])
def test_the_incomplete_tail_is_dropped_and_a_foreign_loader_is_read_to_its_end(
    length: int, size: int, given: int
) -> None:
    foreign = Consumed(range(length), length)
    loader = GradAccumDataloader(foreign, size)
    for _ in range(2):
        foreign.drawn = foreign.ended = 0
        assert list(loader) == list(range(given)) and len(loader) == given
        assert (foreign.drawn, foreign.ended) == (length, 1)


def test_the_last_batch_is_given_before_the_rest_is_consumed() -> None:
    foreign = Consumed(range(10), 10)
    iterator = iter(GradAccumDataloader(foreign, 4))
    assert [next(iterator) for _ in range(8)][-1] == 7 and foreign.drawn == 8
    assert next(iterator, None) is None and foreign.drawn == 10


def test_an_endless_loader_with_a_length_ends() -> None:
    foreign = Consumed(itertools.count(), 10)
    assert list(GradAccumDataloader(foreign, 4)) == list(range(8)) and foreign.drawn == 11


def test_a_torch_loader_is_not_read_beyond_what_is_given() -> None:
    seen: list[int] = []

    class Data(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            seen.append(index)
            return index

    assert torch.cat(list(GradAccumDataloader(DataLoader(Data()), 4))).tolist() == list(range(8))
    assert seen == list(range(8))


def test_iterables_without_a_length_are_read_in_whole_cycles() -> None:
    loader = GradAccumDataloader((i for i in range(10)), 4)
    assert list(loader) == list(range(8))
    with pytest.raises(TypeError, match="no len"):
        len(loader)
    assert list(itertools.islice(GradAccumDataloader(itertools.count(), 4), 9)) == list(range(9))

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(7))

    assert torch.cat(list(GradAccumDataloader(DataLoader(Stream()), 3))).tolist() == list(range(6))


def test_two_live_iterators_do_not_disturb_each_other() -> None:
    loader = GradAccumDataloader(range(10), 4)
    first, second = iter(loader), iter(loader)
    assert [next(first), next(first), next(second), next(first)] == [0, 1, 0, 2]
    assert list(first) == [3, 4, 5, 6, 7] and list(second) == [1, 2, 3, 4, 5, 6, 7]


def test_a_loader_that_ends_before_its_length_just_ends() -> None:
    assert list(GradAccumDataloader(Consumed(range(5), 10), 4)) == list(range(5))


def test_loaders_are_copied_pickled_and_asked_for_what_they_wrap() -> None:
    loader = GradAccumDataloader(DataLoader(range(10), batch_size=1), 4)
    for twin in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert len(twin) == 8 and twin.batch_size == 1 and len(list(twin)) == 8
    with pytest.raises(AttributeError, match="nothing"):
        _ = loader.nothing
    model = make_net()
    optimizer, shared, _, _ = accumulate_gradient(model, sgd(model), [1, 2], 2)
    assert list(pickle.loads(pickle.dumps(shared))) == [1, 2]
    with pytest.raises(TypeError, match="state_dict"):
        copy.copy(optimizer)


# -- save and resume ------------------------------------------------------------------------------------------------


def made(data: list[Any]) -> tuple[nn.Module, GradAccumOptimizer, GradAccumDataloader, GradAccumLrSchedulerByStep]:
    model = make_net()
    inner = sgd(model)
    optimizer, loader, _, scheduler = accumulate_gradient(model, inner, data, 4, lr_scheduler=halving(inner))
    return model, optimizer, loader, scheduler


@pytest.mark.parametrize("stop", range(1, 8))
@pytest.mark.parametrize("tokens", [False, True])
def test_training_resumed_anywhere_in_a_cycle_is_exact(stop: int, tokens: bool) -> None:
    data = batches(10)

    def train(objects: Any, until: int) -> dict[str, Any] | None:
        model, optimizer, loader, scheduler = objects
        for batch in loader:
            optimizer.zero_grad()
            optimizer.backward(mean_loss(model, batch), 4 if tokens else None)
            optimizer.step()
            scheduler.step()
            if loader.state_dict()["position"] == until:
                return {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                    "scheduler": scheduler.state_dict(),
                }
        return None

    through = made(data)
    train(through, 99)
    saved = pickle.loads(pickle.dumps(train(made(data), stop)))
    resumed = made(data)
    for thing, name in zip(resumed, ("model", "optimizer", "loader", "scheduler"), strict=True):
        thing.load_state_dict(saved[name])
    train(resumed, 99)
    for ours, want in zip(resumed[0].parameters(), through[0].parameters(), strict=True):
        assert torch.equal(ours, want)
    assert (through[0].third.weight - make_net().third.weight).abs().max() > 1e-3
    assert resumed[3].get_last_lr() == through[3].get_last_lr() == [LR / 4]


def test_state_goes_to_and_from_the_bare_optimizer() -> None:
    model, data = make_net(), batches(2)
    optimizer = GradAccumOptimizer(sgd(model), 2, model)
    for batch in data:
        optimizer.backward(mean_loss(model, batch))
        optimizer.step()
    bare = sgd(make_net())
    bare.load_state_dict(optimizer.state_dict())
    again = GradAccumOptimizer(sgd(make_net()), 2)
    again.load_state_dict(bare.state_dict())
    buffers = [list(o.state.values())[0]["momentum_buffer"] for o in (optimizer, bare, again)]
    assert torch.equal(buffers[0], buffers[1]) and torch.equal(buffers[0], buffers[2]) and buffers[0].norm() > 0


def test_a_cycle_is_not_resumed_with_another_size_or_another_model() -> None:
    model = make_net()
    optimizer = GradAccumOptimizer(sgd(model), 4, model)
    optimizer.backward(mean_loss(model, batches(1)[0]))
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="1 microbatches into a cycle of 4"):
        GradAccumOptimizer(sgd(make_net()), 2).load_state_dict(saved)
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="'first.weight'"):
        GradAccumOptimizer(sgd(other), 4, other).load_state_dict(saved)


def test_reduced_gradients_are_not_saved() -> None:
    model = make_net()
    optimizer = GradAccumOptimizer(sgd(model), 1, model)
    optimizer.backward(mean_loss(model, batches(1)[0]))
    optimizer.clip_grad_norm(model, 1.0)
    with pytest.raises(AccumulationError, match=r"after optimizer.step\(\)"):
        optimizer.state_dict()

"""Random streams: shared and own, forked and replayed; recomputation drops what was dropped before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core import parallel_state
from core.tensor_parallel import RNGStatesTracker, checkpoint, get_rng_tracker, model_parallel_manual_seed
from core.tensor_parallel.mappings import gather_first
from tests.unit_tests.ranks import ranks


@pytest.fixture(autouse=True)
def forget_streams():
    yield
    get_rng_tracker().reset()


def test_a_fork_draws_from_its_own_stream_and_leaves_the_default_one() -> None:
    tracker = RNGStatesTracker()
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    tracker.add("a", 7)
    with tracker.fork("a"):
        first = torch.rand(3)
    assert torch.equal(torch.rand(4), expected)
    with tracker.fork("a"):
        second = torch.rand(3)

    torch.manual_seed(7)
    assert torch.equal(torch.cat([first, second]), torch.rand(6))


def test_a_snapshot_replays_a_stream_also_from_a_file(tmp_path: Path) -> None:
    tracker = RNGStatesTracker()
    tracker.add("a", 7)
    before = tracker.get_states()
    with tracker.fork("a"):
        first = torch.rand(3)
    torch.save(before, tmp_path / "streams.pt")
    tracker.set_states(torch.load(tmp_path / "streams.pt", weights_only=True))
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), first)


def test_a_fork_that_fails_puts_the_default_stream_back() -> None:
    tracker = RNGStatesTracker()
    tracker.add("a", 7)
    state = torch.get_rng_state()
    with pytest.raises(KeyError), tracker.fork("a"):
        torch.rand(1)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)


def test_streams_that_would_be_one_are_refused() -> None:
    tracker = RNGStatesTracker()
    tracker.add("a", 7)
    with pytest.raises(ValueError, match="'a' exists already"):
        tracker.add("a", 8)
    with pytest.raises(ValueError, match="seed 7 of random stream 'b'"):
        tracker.add("b", 7)
    with pytest.raises(RuntimeError, match="'c' was never seeded.*model_parallel_manual_seed"), tracker.fork("c"):
        pass


@ranks(2)
def test_the_default_stream_is_shared_and_the_model_parallel_one_is_not(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    model_parallel_manual_seed(3)
    shared = gather_first(torch.rand(1, 8), parallel_state.get_tensor_model_parallel_group())
    with get_rng_tracker().fork():
        own = gather_first(torch.rand(1, 8), parallel_state.get_tensor_model_parallel_group())
    assert torch.equal(shared[0], shared[1])
    assert not torch.equal(own[0], own[1])
    get_rng_tracker().reset()


GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


class Dropping(nn.Module):
    """Draws from the default stream, from its own, and from the default one again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), 0.5)
        with get_rng_tracker().fork():
            x = F.dropout(x.tanh(), 0.5)
        return F.dropout(x.sin(), 0.3)


def gradients(recompute: bool, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients after two layers and two microbatches, and what both streams give afterwards."""
    torch.manual_seed(0)
    layers = [Dropping().to(device) for _ in range(2)]
    model_parallel_manual_seed(3)
    for _ in range(2):
        hidden = torch.linspace(-1, 1, 24).view(4, 6).to(device).requires_grad_()
        for layer in layers:
            hidden = checkpoint(layer, False, hidden) if recompute else layer(hidden)
        hidden.sum().backward()
    after = [torch.rand(3, device=device)]
    with get_rng_tracker().fork():
        after.append(torch.rand(3, device=device))
    return [param.grad for layer in layers for param in layer.parameters()], after


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_recomputation_drops_the_same_elements_and_leaves_the_streams_where_they_were(device: str) -> None:
    expected, streams = gradients(recompute=False, device=device)
    got, streams_after = gradients(recompute=True, device=device)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(streams_after, streams, strict=True))
    assert all(grad.abs().max() > 1e-3 for grad in expected)


def test_under_recomputation_a_hook_on_a_parameter_fires_once_a_backward() -> None:
    model_parallel_manual_seed(3)
    layer, fired = Dropping(), []
    layer.linear.weight.register_post_accumulate_grad_hook(lambda param: fired.append(param))
    checkpoint(layer, False, torch.ones(4, 6, requires_grad=True)).sum().backward()
    assert len(fired) == 1


def test_distributing_saved_activations_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="distribute_saved_activations"):
        checkpoint(Dropping(), True, torch.ones(4, 6))

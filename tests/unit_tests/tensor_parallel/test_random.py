"""Random streams: shared and own, forked and replayed; recomputation drops what was dropped before."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from core import parallel_state
from core.pipeline_parallel import build_gpt_stages, plan_pipeline
from core.tensor_parallel import RNGStatesTracker, checkpoint, get_rng_tracker, model_parallel_manual_seed
from core.tensor_parallel.mappings import gather_first
from core.tensor_parallel.random import SEQUENCE_DROPOUT_STREAM
from core.transformer import TransformerConfig
from core.transformer.dropout import hidden_dropout
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


def regions(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], sequence_parallel: bool) -> dict[str, list[Tensor]]:
    """The masks that a stage of a GPT draws in one forward, by region."""
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=16, max_sequence_length=32, hidden_dropout=0.5,
        tensor_model_parallel_size=sizes["tp"], context_parallel_size=sizes["cp"], sequence_parallel=sequence_parallel,
        pipeline_model_parallel_size=sizes["pp"], attention_dropout=0.0 if sizes["cp"] > 1 else 0.5,
    )  # fmt: skip
    layout = plan_pipeline(2, pp=sizes["pp"])
    (stage,) = build_gpt_stages(config, layout)
    groups = parallel_state.get_process_groups()
    found: dict[str, list[Tensor]] = {"hidden": [], "attention": []}
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def recorded_dropout(x: Tensor, *args: Any) -> Tensor:
        with torch.random.fork_rng():
            found["hidden"].append(dropout(torch.ones(4, 1, 8), 0.5))
        return dropout(x, *args)

    def recorded_attention(*args: Any, **kwargs: Any) -> Tensor:
        with torch.random.fork_rng():
            found["attention"].append(torch.rand(16))
        return attention(*args, **kwargs)

    monkeypatch.setattr(F, "dropout", recorded_dropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded_attention)
    positions = 16 // sizes["cp"]
    if groups.rank("pp") > 0:
        stage.set_input_tensor(torch.ones(positions // (sizes["tp"] if sequence_parallel else 1), 1, 8))
    stage(torch.zeros(1, positions, dtype=torch.int64))
    monkeypatch.undo()
    assert found["hidden"] and (found["attention"] or sizes["cp"] > 1)
    with get_rng_tracker().fork(SEQUENCE_DROPOUT_STREAM):
        found["whole sequence"] = [torch.rand(16)]
    return found


GRIDS = ["tp cp", "tp dp", "tp pp", "cp dp"]


@ranks(4)
@pytest.mark.in_suite()
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("axes", GRIDS)
def test_copies_over_tp_have_one_mask_and_everything_else_its_own(
    rank: int, world: int, axes: str, sequence_parallel: bool
) -> None:
    check_masks(rank, axes, sequence_parallel and "tp" in axes)


@pytest.mark.nightly
@ranks(8)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("axes", ["tp cp dp", "tp cp pp", "tp dp pp"])
def test_so_it_is_over_three_axes(rank: int, world: int, axes: str, sequence_parallel: bool) -> None:
    check_masks(rank, axes, sequence_parallel)


def check_masks(rank: int, axes: str, sequence_parallel: bool) -> None:
    """Each region's masks on all ranks: equal where the places on the region's own axes are, different elsewhere."""
    sizes = {axis: 2 if axis in axes.split() else 1 for axis in ("tp", "cp", "dp", "pp")}
    parallel_state.initialize_model_parallel(sizes["tp"], sizes["pp"], context_parallel_size=sizes["cp"])
    model_parallel_manual_seed(5)
    torch.rand(rank)  # ranks that draw for themselves
    with pytest.MonkeyPatch.context() as monkeypatch:
        mine = regions(monkeypatch, sizes, sequence_parallel)
    groups = parallel_state.get_process_groups()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, ({axis: groups.rank(axis) for axis in sizes}, mine))
    own = {
        "hidden": {"dp", "cp", "pp", *(["tp"] if sequence_parallel else [])},
        "attention": {"tp", "cp", "dp", "pp"},
        "whole sequence": {"dp", "pp"},
    }
    for (place, masks), (other_place, others) in itertools.combinations(everywhere, 2):
        for region, axes_of_region in own.items():
            alike = all(place[axis] == other_place[axis] for axis in axes_of_region)
            for mask, other in zip(masks[region], others[region], strict=False):  # the first stage drops embeddings too
                assert torch.equal(mask, other) is alike, f"{region} of {place} and {other_place}"
    whole = torch.cat([mask.flatten() for _, masks in everywhere for mask in masks["hidden"]])
    assert 0.35 < (whole == 0).float().mean() < 0.65
    get_rng_tracker().reset()


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


def gradients(recompute: bool, device: str | torch.device) -> tuple[list[Tensor], list[Tensor]]:
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
def test_recomputation_drops_the_same_elements_and_leaves_the_streams_where_they_were(
    device: str | torch.device,
) -> None:
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_around_a_layer_that_draws_from_a_stream_of_dropout_is_refused(reentrant: bool) -> None:
    """It puts torch's default stream back alone, so the gradient would be that of another mask."""
    model_parallel_manual_seed(3)

    def drop(hidden: Tensor) -> Tensor:
        return hidden_dropout(hidden, 0.5, training=True, tp_size=1, is_split=False)

    hidden = torch.ones(4, 6, requires_grad=True)
    output = torch_checkpoint(drop, hidden, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="Recompute by core.tensor_parallel.checkpoint"):
        output.sum().backward()
    output = checkpoint(drop, False, hidden)
    output.sum().backward()
    assert torch.equal(hidden.grad, output.detach())  # ones in, so the mask is the gradient


def test_distributing_saved_activations_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="distribute_saved_activations"):
        checkpoint(Dropping(), True, torch.ones(4, 6))

"""A model that was built on the meta device: equal weights to one that was built whole, and never whole on a rank."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import LayoutMismatch, finalize_model_grads, materialize
from core.distributed.materialize import MARK, DeferredParameter, make_all
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

STRATEGIES = ("no_shard", "optim", "optim_grads_params")


class Net(nn.Module):
    """A tied embedding, a parameter of the root's own, a frozen layer, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.empty(5, 8))
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.layers[1].requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.words.weight
        self.head.weight.is_embedding_or_output_parameter = True

    def reset_parameters(self) -> None:
        nn.init.normal_(self.places)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))


def on_meta(make: Any = Net) -> nn.Module:
    with torch.device("meta"):
        module: nn.Module = make()
    return module


def built_whole(init: Any) -> Net:
    """As one does without `materialize`; torch's to_empty takes tied weights apart."""
    model = on_meta().to_empty(device="cpu")
    model.head.weight = model.words.weight
    model.head.weight.is_embedding_or_output_parameter = True
    fill = init or (lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
    whole: Net = model.apply(fill)
    return whole


def drawn(part: nn.Module) -> None:
    """Normal numbers for every parameter of a module's own, zeros for its buffers."""
    for param in part.parameters(recurse=False):
        nn.init.normal_(param, std=0.3)
    for buffer in part.buffers(recurse=False):
        buffer.zero_()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("move", ["to", "to channels_last", "half", "bfloat16", "double", "type", "cpu"])
def test_a_move_or_a_cast_before_the_wrap_takes_no_memory(move: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Linear(4, 4), nn.Linear(0, 3), nn.Linear(2, 1))

    wanted = on_meta(make).double()
    model = materialize(on_meta(make))
    moves = {
        "to": lambda: model.to("cpu", torch.float64, non_blocking=True),
        "to channels_last": lambda: model.to(torch.float64, memory_format=torch.channels_last),
        "type": lambda: model.type(torch.float64),
    }
    moves.get(move, getattr(model, move.split()[0]))()
    for param, want in zip(model.parameters(), wanted.parameters(), strict=True):
        assert type(param) is DeferredParameter and param.shape == want.shape
        assert param.dtype == {"half": torch.float16, "bfloat16": torch.bfloat16, "cpu": torch.float32}.get(
            move, torch.float64
        )
        assert param.untyped_storage().nbytes() <= param.itemsize and bool(param.isnan().all())
    make_all(model, vars(model).pop(MARK))
    assert all(type(param) is nn.Parameter and bool(param.isfinite().all()) for param in model.parameters())


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("init", [None, drawn])
@pytest.mark.in_suite()
def test_weights_and_a_step_are_those_of_a_model_built_whole(rank: int, world: int, strategy: str, init: Any) -> None:
    parallel_state.initialize_model_parallel()
    found = []
    for deferred in (False, True):
        model = materialize(on_meta(), init) if deferred else None
        torch.manual_seed(3)
        model = built_whole(init) if model is None else model
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=100)
        assert model.head.weight is model.words.weight and model.words.weight.is_embedding_or_output_parameter
        start = {name: value.clone() for name, value in ddp.state_dict().items()}
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.5), [ddp])
        ddp(torch.arange(20).view(4, 5) % 11).square().mean().backward()
        finalize_model_grads([ddp])
        optimizer.step()
        found.append((start, {name: value.clone() for name, value in ddp.state_dict().items()}))
    (start, stepped), (made, trained) = found
    assert start.keys() == made.keys() and not torch.equal(start["places"], stepped["places"])
    assert [name for name in start if not torch.equal(start[name], made[name])] == []
    assert [name for name in start if not torch.equal(stepped[name], trained[name])] == []


@ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_unequal_weights_are_refused_by_name_or_replaced_by_the_first_ranks(
    rank: int, world: int, strategy: str
) -> None:
    parallel_state.initialize_model_parallel()

    def unequal(part: nn.Module) -> None:
        drawn(part)
        if isinstance(part, nn.Linear) and part.out_features == 11 and rank == 1:
            with torch.no_grad():
                part.bias[3] += 1

    torch.manual_seed(1)
    with pytest.raises(LayoutMismatch, match=r"parameter 'head.bias' has other values on ranks \[1\]"):
        wrap(materialize(on_meta(), unequal), data_parallel_sharding_strategy=strategy)
    torch.manual_seed(rank)
    ddp = wrap(materialize(on_meta(), unequal), data_parallel_sharding_strategy=strategy, initial_weights="broadcast")
    torch.manual_seed(0)
    expected = built_whole(drawn).state_dict()
    got = ddp.state_dict()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


@ranks(2)
@pytest.mark.parametrize("initial_weights", ["check", "broadcast"])
def test_what_init_does_wrong_is_said_on_all_ranks(rank: int, world: int, initial_weights: str) -> None:
    parallel_state.initialize_model_parallel()

    def leaves_out(part: nn.Module) -> None:
        drawn(part)
        if isinstance(part, nn.Linear) and rank == 1:
            with torch.no_grad():
                part.bias[0] = torch.nan

    def writes_others(part: nn.Module) -> None:
        drawn(part)
        if isinstance(part, Net):
            nn.init.zeros_(part.layers[0].weight)

    options = {"data_parallel_sharding_strategy": "optim_grads_params", "initial_weights": initial_weights}
    theirs = "init has not written all of parameter 'layers.0.bias' of a Linear"
    torch.manual_seed(1)
    with pytest.raises((ValueError, RuntimeError), match=theirs if rank == 1 else f"rank 1 failed.*{theirs}"):
        wrap(materialize(on_meta(), leaves_out), **options)
    with pytest.raises(ValueError, match="init of a Net has used a parameter of another module"):
        wrap(materialize(on_meta(), writes_others), **options)


def test_what_cannot_be_materialized_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"parameter 'places' has values already"):
        materialize(Net())
    with pytest.raises(ValueError, match=r"module 'inner' \(MultiheadAttention\) has no reset_parameters\(\)"):
        materialize(nn.ModuleDict({"inner": on_meta(lambda: nn.MultiheadAttention(4, 2))}))


def resident_bytes() -> int:
    """Private and shared memory of this process, of a page that n ranks share 1/n."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Anonymous:", "Pss_Shmem:")))


def assert_no_rank_holds_the_model(layers: int, width: int, world: int) -> None:
    """Looks at the memory while each module is whole, and at the end, next to what the process had before."""
    parallel_state.initialize_model_parallel()
    gc.collect()
    before, peaks = resident_bytes(), [0]

    def init(part: nn.Module) -> None:
        for param in part.parameters(recurse=False):
            nn.init.constant_(param, 2.0**-11)
        peaks.append(resident_bytes() - before)

    model = on_meta(lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))))
    ddp = wrap(materialize(model, init), data_parallel_sharding_strategy="optim_grads_params")
    peaks.append(resident_bytes() - before)
    one = 4 * width * width
    share = layers * one / world
    assert 0.9 * share < max(peaks) < share + 2 * one + 2**24, [peak >> 20 for peak in peaks]
    with torch.no_grad():
        expected = torch.full((1, width), (width * 2.0**-11) ** layers)
        torch.testing.assert_close(ddp(torch.ones(1, width)), expected, rtol=1e-4, atol=0)


@ranks(2)
def test_no_rank_ever_holds_the_whole_model(rank: int, world: int) -> None:
    """320 MB of parameters in layers of 40 MB, which no allocator keeps for later."""
    assert_no_rank_holds_the_model(8, 3200, world)


@pytest.mark.nightly
@ranks(4)
def test_no_rank_ever_holds_the_whole_model_of_2_gib(rank: int, world: int) -> None:
    assert_no_rank_holds_the_model(32, 4096, world)

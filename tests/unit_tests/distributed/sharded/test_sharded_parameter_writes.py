"""Writes to sharded parameters, and loads of them: what is not the same on all ranks is told on all, by name."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin
from core.distributed import DistributedDataParallelConfig, MemStats, Placement, SyncError, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.booster.test_booster_checkpoint import shared
from tests.unit_tests.distributed.sharded.test_sharded_parameters import ADAM, Model, loss_of, sharded, unsharder_of
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import make_net

# -- writes in a forward ----------------------------------------------------------------------------------------------


class WritesData(nn.Module):
    """Its forward limits its weight through `.data`, which torch does not count as a write to the weight."""

    def __init__(self, *, used_before: bool, writes: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.used_before, self.writes = used_before, writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.used_before:  # then its values are there already
            x = self.second(x)
        weight = self.second.weight.data
        if self.writes:
            weight[0].clamp_(-0.01, 0.01)
        return F.linear(x, weight) + self.second(x)


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("used_before", [True, False])
def test_a_write_through_data_in_a_forward_is_refused(rank: int, world: int, share: bool, used_before: bool) -> None:
    parallel_state.initialize_model_parallel()
    x = torch.ones(2, 8)
    reads = WritesData(used_before=used_before, writes=False)
    expected = reads(x)
    assert torch.equal(sharded(reads, share_host_memory=share)(x), expected)
    ddp = sharded(WritesData(used_before=used_before, writes=True), share_host_memory=share)
    after = "the one copy that all share: load a checkpoint" if share else "keeps only its shard: the write is lost"
    with pytest.raises(SyncError, match=f"parameter 'second.weight' was written while .*{after}"):
        ddp(x)


@ranks(2)
def test_a_write_through_data_in_a_backward_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(WritesData(used_before=False, writes=False), share_host_memory=False)
    out = ddp(torch.ones(2, 8))

    def write(_: torch.Tensor) -> None:
        ddp.module.first.bias.data.zero_()

    out.register_hook(write)
    with pytest.raises(SyncError, match="parameter 'first.bias' was written while"):
        out.sum().backward()


# -- loads ------------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_ranks_that_load_different_values_are_reported(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model(), share_host_memory=share)
    said = r"rank 1 has parameter 'places' with checksum .*; rank 0 has parameter 'places' .* load the same files"
    with pytest.raises(SyncError, match=said), unsharder_of(ddp).loading(), torch.no_grad():
        ddp.module.words.weight.copy_(torch.full((11, 12), 2.0))
        ddp.module.places.copy_(torch.full((6, 12), 1.0 + rank))
    other = {0: SyncError, 1: KeyError}[rank]  # each has an error, and waits for no one
    with pytest.raises(other, match="nothing there"), unsharder_of(ddp).loading():
        if rank == 1:
            raise KeyError("nothing there")
    with unsharder_of(ddp).loading(), torch.no_grad():
        for name, param in ddp.module.named_parameters():
            param.copy_(Model().get_parameter(name))
    assert all(torch.equal(ddp.state_dict()[name], value) for name, value in Model().state_dict().items())


@ranks(2)
def test_booster_files_that_differ_between_ranks_are_reported(rank: int, world: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    for number in range(2):
        torch.manual_seed(number)
        plugin = GeminiPlugin(precision="fp32", min_chunk_size_m=0, search_range_m=0, hidden_dim=60)
        booster, plain = Booster(plugin=plugin), nn.Linear(8, 8)
        model, *_ = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
        booster.save_model(model, folder / str(number), shard=True)
    with pytest.raises(SyncError, match="rank 1 has parameter 'bias' with checksum"):
        booster.load_model(model, folder / str(rank))
    booster.load_model(model, folder / "0")


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_a_state_that_one_rank_cannot_use_is_reported_on_all_before_anything_is_changed(
    rank: int, world: int, share: bool
) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model(), share_host_memory=share)
    optimizer = get_megatron_optimizer(OptimizerConfig(**ADAM), [ddp])

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(ddp, rank, number).backward()
        finalize_model_grads([ddp])
        optimizer.step()

    step(0)
    state = optimizer.state_dict()
    before = {name: [entry["exp_avg"].tolist() for entry in entries] for name, entries in state["state"].items()}
    spoilt = {**state, "state": {name: [{**e, "exp_avg": e["exp_avg"] * 2} for e in entries]
                                 for name, entries in state["state"].items()}}  # fmt: skip
    missing = next(reversed(before))
    if rank == 1:
        del spoilt["state"][missing]
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match=f"the saved optimizer state lacks '{missing}'"):
        optimizer.load_state_dict(spoilt)
    now = optimizer.state_dict()["state"]
    assert {name: [entry["exp_avg"].tolist() for entry in entries] for name, entries in now.items()} == before
    step(1)


# -- torch.compile, and a deleted wrapper -----------------------------------------------------------------------------

COMPILED_LINEAR = torch.compile(F.linear, backend="aot_eager")


class UsesCompiledFunction(nn.Module):
    """Gives its weight to a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(COMPILED_LINEAR(x, layer.weight))
        return x


def compiled(model: nn.Module, how: str) -> nn.Module:
    if how == "inside":
        return nn.Sequential(torch.compile(model, backend="aot_eager"))
    for part in model.children() if how == "layers" else ():
        part.compile(backend="aot_eager")
    return model


@ranks(2, timeout_s=120.0)
@pytest.mark.parametrize("share", [pytest.param(True, marks=pytest.mark.nightly), False])
@pytest.mark.parametrize("buckets", ["one", "several"])
@pytest.mark.parametrize(
    "how", ["around", "module", *(pytest.param(h, marks=pytest.mark.nightly) for h in ("inside", "layers", "function"))]
)
@pytest.mark.in_suite(2)
def test_a_compiled_model_trains_as_the_plain_one(rank: int, world: int, how: str, buckets: str, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    torch._dynamo.reset()
    plain = UsesCompiledFunction() if how == "function" else make_net(torch.float32)
    x = torch.randn(3, 8 if how == "function" else 5, generator=torch.Generator().manual_seed(rank))
    losses = []
    for compiles in (False, True):
        model = compiled(copy.deepcopy(plain), how) if compiles else copy.deepcopy(plain)
        ddp = sharded(model, share_host_memory=share, bucket_size=None if buckets == "one" else 64)
        assert (len(unsharder_of(ddp).units) == 1) is (buckets == "one")
        outside = torch.compile(ddp, backend="aot_eager") if compiles and how == "around" else ddp
        if compiles and how == "module":
            ddp.module.compile(backend="aot_eager")
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.0), [outside])
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = outside(x).square().sum()
            loss.backward()
            finalize_model_grads([outside])
            optimizer.step()
            losses[-1].append(float(loss))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0][2] < 0.95 * losses[0][0]


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_parameters_of_a_deleted_wrapper_cannot_be_used(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    model = Model()
    ddp = sharded(model, share_host_memory=share)
    ddp(torch.zeros(1, 6, dtype=torch.int64))
    gone = weakref.ref(unsharder_of(ddp))
    del ddp
    gc.collect()
    # gloo's thread keeps a finished gather, and with it the hooks of the forward that launched it, for a moment
    until = time.monotonic() + 10
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.001)
    assert gone() is None
    for use in (
        lambda: model.places.sum(),
        lambda: model.places.data,
        lambda: nn.init.zeros_(model.places),
        lambda: model(torch.zeros(1, 6, dtype=torch.int64)),
    ):
        with pytest.raises(SyncError, match="was sharded by a wrapper .* which was deleted"):
            use()


# -- options without an effect ----------------------------------------------------------------------------------------


def test_options_of_a_placement_that_nothing_reads_are_refused() -> None:
    stats = MemStats((0, 1), 5)
    everything: dict[str, Any] = {"shard_param_frac": 1, "offload_param_frac": 1, "offload_optim_frac": 1}
    budget = {**everything, "directory": "/tmp", "memory_budget_bytes": 5}
    for options, words in (
        (
            {"memstats": stats},
            "memstats is MemStats.*, but it has no effect if .*; set memory_budget_bytes",
        ),
        ({"warmup_non_model_data_ratio": 0.5}, "warmup_non_model_data_ratio is 0.5, and without memory_budget_bytes"),
        ({"steady_cap_ratio": 0.5}, "steady_cap_ratio is 0.5, and without memory_budget_bytes nothing reads it"),
        ({**budget, "prefetch": 1}, "prefetch is 1, and a budget of 5 bytes has no room"),
        ({**budget, "memstats": 3}, "memstats is 3; it is the MemStats that"),
    ):
        with pytest.raises(ValueError, match=words):
            Placement(**options)
    sharded_all: Any = {"data_parallel_sharding_strategy": "optim_grads_params"}
    with pytest.raises(ValueError, match="reshard_after_forward=False keeps every bucket unsharded, but .* to 5 bytes"):
        DistributedDataParallelConfig(**sharded_all, reshard_after_forward=False, placement=Placement(**budget))
    with pytest.raises(ValueError, match="prefetch 0, but strategy 'optim' does not shard parameters"):
        DistributedDataParallelConfig(data_parallel_sharding_strategy="optim", placement=Placement(prefetch=0))

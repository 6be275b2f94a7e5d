"""placement_policy='auto': a budget of bytes is kept, changes no bit, and a larger one costs fewer transfers."""

import contextlib
import functools
import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from core.booster import Booster
from core.booster.plugin import GeminiPlugin
from core.distributed import MemStats, Placement
from core.distributed.sharded.eviction import Budget
from core.distributed.sharded.param_unit import KeepUnsharded
from tests.unit_tests.booster.booster_reference import full_weights
from tests.unit_tests.booster.test_booster_checkpoint import shared
from tests.unit_tests.booster.test_gemini_placement import Files, boosted, layers, losses_of
from tests.unit_tests.booster.test_low_level_zero_options import over_sockets
from tests.unit_tests.ranks import ranks


class Watch:
    """Bytes of whole buckets after each gather, by their memory, and the number of gathers."""

    def __init__(self, model: Any) -> None:
        self.unsharder = model.module.engine.params
        self.most = self.count = 0
        gather = self.unsharder._all_gather

        def watched(unit: Any, *rest: Any, **more: Any) -> Any:
            answer = gather(unit, *rest, **more)
            self.count += 1
            whole = [unit.full for unit in self.unsharder.units if unit.full is not None]
            self.most = max(self.most, sum(tensor.nbytes for tensor in whole))
            return answer

        self.unsharder._all_gather = watched


def sizes(model: Any) -> tuple[int, int]:
    """Bytes of a rank: of gradients, which always lie on the device, and of all whole buckets of parameters."""
    engine = model.module.engine
    grads = sum(buffer.grad_data.nbytes + buffer.pool.memory.nbytes for buffer in engine.buffers)
    return grads, sum(unit.layout.numel * unit.shard.itemsize for unit in engine.params.units)


def steps(booster: Booster, model: Any, optimizer: Any, rank: int, which: range) -> list[float]:
    losses = []
    for step in which:
        optimizer.zero_grad()
        for microbatch in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + rank))
            with booster.no_sync(model, optimizer) if microbatch == 0 else contextlib.nullcontext():
                loss = (model(x).float() - x).square().mean() / 2
                booster.backward(loss, optimizer)
            losses.append(float(loss))
        optimizer.step()
    return losses


def auto(precision: str, folder: Path, budget: int, **options: Any) -> tuple[Booster, Any, Any]:
    where = {"offload_directory": folder, "memory_budget_bytes": budget, "steady_cuda_cap_ratio": 1.0}
    return boosted(precision, placement_policy="auto", **{**where, **options})


def check_budgets(rank: int, folder: Path, precision: str) -> None:
    booster, model, optimizer = boosted(precision)
    wanted = steps(booster, model, optimizer, rank, range(4))
    weights = full_weights(model)
    booster, model, optimizer = auto(precision, folder, 10**9)
    assert model.memstats is None
    grads, whole = sizes(model)
    steps(booster, model, optimizer, rank, range(1))
    stats = model.memstats
    assert stats is not None and model.module.memstats is stats
    # Of each of six blocks the input of the first layer, and of the second, which is what tanh saves as well.
    assert stats.non_model_bytes == 4 * (6 * 8 + 104) * (4 if precision == "fp32" else 2)
    counts = []
    for percent in (30, 50, 70, 100):
        room = percent * whole // 100
        for given in (None, stats):
            booster, model, optimizer = auto(precision, folder, grads + stats.non_model_bytes + room, memstats=given)
            watch = Watch(model)
            losses = steps(booster, model, optimizer, rank, range(1))
            first, watch.count = watch.count, 0
            losses += steps(booster, model, optimizer, rank, range(1, 4))
            assert losses == wanted, percent
            assert watch.most <= room, f"{watch.most} bytes are whole, and {room} were allowed"
            assert percent < 100 or watch.most == whole
            assert model.memstats.non_model_bytes == stats.non_model_bytes
            if given is None:
                counts.append(watch.count)
                assert first * 3 > watch.count or percent == 30, "the first step keeps least"
            else:
                assert (first, watch.count) == (counts[-1] // 3, counts[-1]), "no warm-up with an earlier run's numbers"
            ours = full_weights(model)
            assert all(torch.equal(ours[name], weight) for name, weight in weights.items())
    said = f"budget of {grads + stats.non_model_bytes + whole} bytes: {grads} of gradients, {stats.non_model_bytes} of"
    assert said in model.module.describe() and f"{whole} for unsharded buckets" in model.module.describe()
    units = len(model.module.engine.params.units)
    assert counts[0] > counts[1] > counts[2] > counts[3] == 3 * units


@ranks(2)
def test_a_budget_is_kept_and_a_larger_one_costs_fewer_transfers(rank: int, world: int, tmp_path: Path) -> None:
    check_budgets(rank, shared(tmp_path), "fp32")


@ranks(2, nightly=(1, 3))
@over_sockets
@pytest.mark.nightly
def test_a_budget_is_kept_where_gathers_are_collective(rank: int, world: int, tmp_path: Path) -> None:
    check_budgets(rank, shared(tmp_path), "bf16")


def one_backward(model: Any, optimizer: Any, rank: int, rows: int, forwards: int = 1) -> float:
    optimizer.zero_grad()
    inputs = [torch.randn(rows, 8, generator=torch.Generator().manual_seed(10 * n + rank)) for n in range(forwards)]
    loss = torch.stack([(model(x).float() - x).square().mean() for x in inputs]).mean()
    optimizer.backward(loss)
    optimizer.step()
    return float(loss)


@ranks(2)
def test_a_step_that_keeps_more_than_the_first_one_is_reported_and_counted_from_then_on(
    rank: int, world: int, tmp_path: Path
) -> None:
    folder = shared(tmp_path)
    _, model, optimizer = boosted("fp32")
    turns = [(4, 1), (4, 1), (4, 2), (4, 2), (12 if rank == 1 else 4, 1), (4, 1)]
    wanted = [one_backward(model, optimizer, rank, *turn) for turn in turns]
    row = (6 * 8 + 104) * 4  # bytes that a forward keeps, as in check_budgets
    grads, whole = sizes(auto("fp32", folder, 10**9)[1])
    _, model, optimizer = auto("fp32", folder, grads + 4 * row + whole)
    watch, budget = Watch(model), model.module.engine.params.eviction
    counted = []
    for turn, loss in zip(turns, wanted, strict=True):
        said = pytest.warns(UserWarning, match=r"has kept \d+ bytes .* the budget of \d+ bytes counts on \d+")
        with said if len(counted) in (2, 4) else contextlib.nullcontext():
            assert one_backward(model, optimizer, rank, *turn) == loss
        counted.append(model.memstats.non_model_bytes // row)
        assert budget.limit == whole + (4 - counted[-1]) * row
    assert counted == [4, 4, 8, 8, 12, 12], "one row is one row of inputs, of all forwards since a backward"
    watch.most = 0
    one_backward(model, optimizer, rank, 4)
    assert 0 < watch.most <= budget.limit < whole


@ranks(2)
def test_a_part_of_the_budget_is_left_free_in_the_first_step_and_another_in_later_ones(
    rank: int, world: int, tmp_path: Path
) -> None:
    """A part that leaves room for half of the buckets, and one that leaves room for all, in both orders."""
    folder = shared(tmp_path)
    _, model, _ = auto("fp32", folder, 10**9)
    grads, whole = sizes(model)
    units, kept = len(model.module.engine.params.units), 4 * (6 * 8 + 104) * 4  # see check_budgets
    budget = 2 * (grads + kept + whole)
    found = {}
    for first in (50, 100):
        for later in (50, 100):
            booster, model, optimizer = auto(
                *("fp32", folder, budget),
                warmup_non_model_data_ratio=1 - (grads + first * whole / 100 + 0.5) / budget,
                steady_cuda_cap_ratio=(grads + kept + later * whole / 100 + 0.5) / budget,
            )
            watch = Watch(model)
            for which in (range(1), range(1, 2)):
                watch.most = watch.count = 0
                steps(booster, model, optimizer, rank, which)
                percent = later if which.start else first
                assert watch.most <= percent * whole // 100, (first, later, which)
                found[first, later, which.start] = watch.count, watch.most
    for percent in (50, 100):
        assert found[percent, 50, 0] == found[percent, 100, 0] and found[50, percent, 1] == found[100, percent, 1]
    for step in (0, 1):
        assert found[100, 100, step] == (units, whole)
        count, most = found[50, 50, step]
        assert count > 1.3 * units and 0 < most < whole, found


@ranks(2)
def test_two_buckets_that_do_not_fit_are_named_with_the_budget(rank: int, world: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    grads, _ = sizes(auto("fp32", folder, 10**9)[1])
    largest = r"parameters of bucket \d+ \(.*\) and parameters of bucket \d+ \(.*\) are used one after the other"
    with pytest.raises(
        ValueError, match=largest + rf" and take \d+ bytes unsharded, but the budget of {grads + 9} bytes leaves 9"
    ):
        auto("fp32", folder, grads + 9)
    budget = grads + 2 * 384 * 4 + 100  # enough until what a forward keeps is known
    booster, model, optimizer = auto("fp32", folder, budget)
    with pytest.raises(ValueError, match=rf"take 30\d\d bytes unsharded, but the budget of {budget} bytes"):
        steps(booster, model, optimizer, rank, range(1))


@ranks(1)
def test_what_auto_needs_is_named(rank: int, world: int, tmp_path: Path) -> None:
    needed = {"placement_policy": "auto", "offload_directory": tmp_path, "memory_budget_bytes": 1000}
    for options, words in (
        ({"memory_budget_bytes": None}, "on a CPU needs memory_budget_bytes"),
        ({"offload_directory": None}, "on a CPU needs memory_budget_bytes"),
        ({"memory_budget_bytes": 1.5}, "memory_budget_bytes must be an integer of at least 1, or None, got 1.5"),
        ({"gpu_margin_mem_ratio": 0.5}, "gpu_margin_mem_ratio is 0.5, and masters and moments stay offloaded"),
        ({"shard_param_frac": 0.5}, "shard_param_frac is 0.5, and only placement_policy='static' reads it"),
        ({"offload_optim_frac": 0.5}, "offload_optim_frac is 0.5, and only placement_policy='static' reads it"),
        (
            {"warmup_non_model_data_ratio": 2},
            "warmup_non_model_data_ratio must be a number of at least 0 and at most 1, got 2",
        ),
        ({"steady_cuda_cap_ratio": -1}, "steady_cap_ratio must be a number of at least 0 and at most 1, got -1"),
        ({"max_prefetch": 1}, "max_prefetch is 1; .*none with placement_policy='auto'"),
        ({"strict_ddp_mode": True}, "leave placement_policy 'static'"),
    ):
        with pytest.raises(ValueError, match=words):
            GeminiPlugin(**{**needed, **options})
    with pytest.raises(ValueError, match="set all three to 1"):
        Placement(directory="/tmp", memory_budget_bytes=5)
    with pytest.raises(ValueError, match="only placement_policy='auto' reads it"):
        GeminiPlugin(memory_budget_bytes=5)


# -- the choice, without processes ------------------------------------------------------------------------------------


def transfers(uses: list[int], room: int, rounds: int) -> int:
    """What Budget makes of buckets of one byte in this order of uses, `rounds` times."""
    units = {n: SimpleNamespace(number=n, name=f"b{n}", full=None, layout=SimpleNamespace(numel=1),
                                shard=SimpleNamespace(itemsize=1)) for n in set(uses)}  # fmt: skip
    stats = MemStats(tuple(uses), 0)
    placement = Placement(offload_param_frac=1, offload_optim_frac=1, memory_budget_bytes=room, memstats=stats)
    budget = Budget(list(units.values()), placement, 0)  # type: ignore[arg-type]
    whole: list[Any] = []
    for number in uses * rounds:
        unit = units[number]
        whole = [other for other in whole if other is not unit]
        for victim in budget.evict(whole, unit, ()):  # type: ignore[arg-type]
            whole.remove(victim)
            victim.full = None
        whole.append(unit)
        unit.full = torch.ones(1)
        assert len(whole) <= room
    return budget.transfers


def fewest(uses: list[int], room: int) -> int:
    """The fewest transfers of any choice, by trying all of them."""

    @functools.cache
    def from_here(place: int, whole: frozenset[int]) -> int:
        if place == len(uses):
            return 0
        number = uses[place]
        if number in whole:
            return from_here(place + 1, whole)
        if len(whole) < room:
            return 1 + from_here(place + 1, whole | {number})
        return 1 + min(from_here(place + 1, whole - {other} | {number}) for other in whole)

    return from_here(0, frozenset())


def test_the_bucket_whose_next_use_is_farthest_is_given_up() -> None:
    forward_and_backward = [*range(6), *range(5, -1, -1)]
    for room in range(2, 7):
        assert transfers(forward_and_backward, room, 1) == 12 - room == fewest(forward_and_backward, room)
    generator = random.Random(3)
    for _ in range(30):
        uses = [generator.randrange(6) for _ in range(14)]
        uses = [one for place, one in enumerate(uses) if place == 0 or uses[place - 1] != one]
        for room in (2, 3, 4):
            assert transfers(uses, room, 2) == fewest(uses * 2, room)


# -- recomputation -----------------------------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """Forgets what its blocks compute, and runs each again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = layers()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@ranks(2, nightly=(1, 3))
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_layer_that_runs_again_keeps_is_in_the_budget(
    rank: int, world: int, tmp_path: Path, reentrant: bool
) -> None:
    folder, itemsize, rows = shared(tmp_path), 4, 4
    booster, model, optimizer = boosted("fp32", Recomputed(reentrant))
    wanted = losses_of(booster, model, optimizer, rank)
    booster, model, optimizer = auto("fp32", folder, 10**9, model=Recomputed(reentrant))
    assert losses_of(booster, model, optimizer, rank) == wanted
    # The inputs of six blocks; and of the longest, while it has been run again, the inputs once more, 40 activations a
    # row, and its weights, which torch's newer checkpoint keeps as they are: all of the buckets they lie in.
    inputs, activations = rows * 6 * 8 * itemsize, rows * (8 + 40) * itemsize
    units = model.module.engine.params.units
    of_longest = [unit for unit in units if {"blocks.1.0.weight", "blocks.1.2.weight"} & set(unit.names)]
    weights = 0 if reentrant else sum(unit.layout.numel * itemsize for unit in of_longest)
    assert model.memstats.non_model_bytes == inputs + activations + weights
    always, whole = sizes(model)
    budget = always + inputs + activations + weights + whole // 2
    booster, model, optimizer = auto("fp32", folder, budget, model=Recomputed(reentrant))
    watch = Watch(model)
    assert losses_of(booster, model, optimizer, rank) == wanted
    assert 0 < watch.most <= whole // 2


# -- fractions in the order of an earlier run --------------------------------------------------------------------------


class Backwards(nn.Module):
    """Uses its blocks from the last one registered to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(list(self.blocks)):
            x = block(x)
        return x


def first_use(bucket: Any, *, backwards: bool) -> tuple[int, str, bool]:
    """Of the parameter of a bucket that `Backwards` uses first, or registers first: block, layer, weight or bias."""
    names = [slot.name.split(".") for slot in bucket.layout.slots]
    return min((-int(block) if backwards else int(block), layer, kind == "bias") for _, block, layer, kind in names)


@ranks(2)
@over_sockets
def test_fractions_are_taken_in_the_order_in_which_an_earlier_run_has_used_chunks(
    rank: int, world: int, tmp_path: Path
) -> None:
    folder = shared(tmp_path)
    booster, model, optimizer = auto("fp32", folder, 10**9, model=Backwards())
    wanted = losses_of(booster, model, optimizer, rank)
    stats, taken = model.memstats, []
    for given in (None, stats):
        options = {"shard_param_frac": 0.6, "offload_param_frac": 0.5, "offload_optim_frac": 0.3}
        booster, model, optimizer = boosted(
            "fp32", Backwards(), **options, offload_directory=folder, memstats=given, placement_policy="static"
        )
        assert losses_of(booster, model, optimizer, rank) == wanted, "the same training, to the bit"
        files, units, buckets = Files(folder), model.module.engine.params.units, model.module.reducer.buckets
        for all_of, which, from_end, fraction in (
            (units, [unit.keep_unsharded is KeepUnsharded.STEP for unit in units], False, 0.4),
            (units, [files.bytes_of([unit.shard]) > 0 for unit in units], True, 0.5),
            (buckets, [bucket.memory.state_tier is not None for bucket in buckets], True, 0.3),
            (buckets, [files.bytes_of([bucket.memory.owned_grad]) > 0 for bucket in buckets], True, 0.5),
        ):
            order = sorted(range(len(all_of)), key=lambda n: first_use(all_of[n], backwards=given is not None))
            chosen = [which[number] for number in order]
            assert chosen == sorted(chosen, reverse=not from_end), (given, fraction)
            nbytes = [all_of[number].layout.numel for number in order]
            found = sum(itertools.compress(nbytes, chosen))
            assert abs(found - fraction * sum(nbytes)) <= max(nbytes) / 2
        taken.append([unit.layout.slots[0].name for unit in units if files.bytes_of([unit.shard])])
    assert not set(taken[0]) & set(taken[1]), "what is registered last is used first"


@ranks(2)
def test_what_an_earlier_run_of_another_model_has_found_is_refused(rank: int, world: int, tmp_path: Path) -> None:
    of_another = MemStats((1, 0, 700), 0)
    words = "memstats has a bucket of number 700, and the model has .*; they are of another model, or of other sizes"
    with pytest.raises(ValueError, match=words):
        boosted("fp32", shard_param_frac=0.5, memstats=of_another)
    with pytest.raises(ValueError, match=words):
        auto("fp32", shared(tmp_path), 10**9, memstats=of_another)

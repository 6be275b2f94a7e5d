"""Strategy optim_grads: backward waits for no rank that may be waiting for this one elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, finalize_model_grads, streamed_bucket
from core.distributed.simulated_wire import Wire
from core.distributed.socket_channel import SocketChannel
from core.distributed.streamed_bucket import BucketPool
from core.gradient_accumulation import accumulate_gradient
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, whole_grads, wrap
from tests.unit_tests.test_host_memory import at_once, channels_of

LAYERS = 8


class Layers(nn.Module):
    """A bucket each, any of which can be left out; the last one's gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, left_out: set[int]) -> torch.Tensor:
        used = [layer for number, layer in enumerate(self.layers) if number not in left_out]
        return sum((layer(x).square().sum() for layer in used), torch.zeros((), dtype=torch.float64))


def inputs_of(rank: int, step: int, microbatch: int) -> torch.Tensor:
    return torch.tensor([1.0 + rank, 2.0 - step + 3 * microbatch], dtype=torch.float64)


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """For pools that are made, or begin a step, in this block."""
    before = streamed_bucket.PATIENCE_S
    streamed_bucket.PATIENCE_S = seconds
    try:
        yield
    finally:
        streamed_bucket.PATIENCE_S = before


@ranks(2, timeout_s=30)
@pytest.mark.parametrize("share", [False, True], ids=["sockets", "memory"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("reduce_microbatches", ["last", "every"])
@pytest.mark.parametrize("left_out", [{0}, {LAYERS - 1}, set(range(LAYERS)) - {3}], ids=["last", "first", "most"])
def test_ranks_may_talk_to_each_other_between_backward_and_finalize(
    rank: int, world: int, left_out: set[int], reduce_microbatches: str, overlap: bool, share: bool
) -> None:
    """Rank 0 leaves out a few layers, and with 'every' a microbatch: its buckets leave in finalize, after the exchange
    for which the other ranks must come out of their backward.
    """
    parallel_state.initialize_model_parallel()
    plain = Layers()
    torch.manual_seed(3)
    for param in plain.parameters():
        nn.init.normal_(param)
    ddp_module = Layers()
    ddp_module.load_state_dict(plain.state_dict())
    microbatches = {r: 1 if r == 0 or reduce_microbatches == "last" else 3 for r in range(world)}
    with patience(0.05):
        ddp = wrap(
            ddp_module,
            data_parallel_sharding_strategy="optim_grads",
            bucket_size=1,
            overlap_grad_reduce=overlap,
            reduce_microbatches=reduce_microbatches,
            share_host_memory=share,
        )
        assert len(ddp.grad_buffers[0].buckets) == LAYERS
        for step in range(3):
            plain.zero_grad()
            for r in range(world):
                for n in range(microbatches[r]):
                    (plain(inputs_of(r, step, n), left_out if r == 0 else set()) / world).backward()
            ddp.zero_grad_buffer()
            for n in range(microbatches[rank]):
                ddp(inputs_of(rank, step, n), left_out if rank == 0 else set()).backward()
            told = torch.full((1,), float(rank))
            dist.all_reduce(told)
            assert told.item() == sum(range(world))
            finalize_model_grads([ddp])
            expected = {name: param.grad for name, param in plain.named_parameters()}
            assert min(float(grad.abs().max()) for grad in expected.values()) > 0.1
            assert_same(whole_grads(ddp), expected)
            assert not any(pool.in_flight for pool in ddp.reducer.pools)


@ranks(3, timeout_s=30)
def test_a_rank_without_any_gradient_may_do_other_things_first(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    with patience(0.05):
        ddp = wrap(Layers(), data_parallel_sharding_strategy="optim_grads", bucket_size=1, overlap_grad_reduce=True)
        plain = Layers()
        plain.load_state_dict(ddp.module.state_dict())
        for step in range(2):
            ddp.zero_grad_buffer()
            plain.zero_grad()
            for r in (1, 2):
                (plain(inputs_of(r, step, 0), set()) / world).backward()
            if rank > 0:
                ddp(inputs_of(rank, step, 0), set()).backward()
            dist.barrier()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), {name: param.grad for name, param in plain.named_parameters()})


class Scripted:
    """A bucket on the wire, as its pool sees it: `script` gives the progress of each look, None when it is done."""

    def __init__(self, pool: BucketPool, script: list[int | None], look_s: float = 0.0) -> None:
        self.pool, self.script, self.look_s = pool, script, look_s
        self.handle, self.event = self, SimpleNamespace(wait_start_s=None)
        pool.in_flight.append(self)  # type: ignore[arg-type]

    def begin_wait(self) -> None:
        self.event.wait_start_s = 0.0

    def poll(self) -> bool:
        time.sleep(self.look_s)
        self.now = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return self.now is None

    def progress(self) -> int:
        assert self.now is not None
        return self.now

    def absorb(self) -> None:
        self.pool.in_flight.popleft()


def test_patience_is_for_a_wait_in_which_nothing_comes() -> None:
    with patience(0.05):
        pool = BucketPool(torch.zeros(8))
        pool.begin_step()
        Scripted(pool, [*range(300), None])  # 300 sleeps that grow up to a millisecond would take longer
        assert pool.absorb_soon() and not pool.gave_up
        stuck = Scripted(pool, [7])
        begun = time.perf_counter()
        assert not pool.absorb_soon() and pool.gave_up
        assert time.perf_counter() - begun >= 0.05 and stuck.event.wait_start_s is None
        before, looks = pool.patience_s, []
        stuck.poll = lambda: looks.append(1) or Scripted.poll(stuck)  # type: ignore[method-assign,func-returns-value]
        assert not pool.absorb_soon() and len(looks) == 1 and pool.patience_s == before  # looks, and waits no more
        stuck.script = [8, 8, None]  # something has come, so it waits again
        assert pool.absorb_soon() and len(looks) == 4 and pool.patience_s == pool.most_patience_s == 0.05


def test_progress_in_mapped_memory_is_what_the_other_ranks_have_done() -> None:
    channels, tensors = channels_of(2, 8)
    mine = channels[0].reduce_scatter(tensors[0][:4])
    seen = [mine.progress()]
    channels[0].reduce_scatter(tensors[0][4:])
    assert mine.progress() == seen[0]  # what this rank launches itself has not come from another
    theirs = channels[1].reduce_scatter(tensors[1][:4])
    seen.append(mine.progress())
    theirs.poll()
    seen.append(mine.progress())
    assert len(set(seen)) == 3


@ranks(2, timeout_s=30)
def test_progress_through_sockets_is_every_chunk(rank: int, world: int) -> None:
    channel = SocketChannel(dist.group.WORLD)
    channel.chunk_bytes = 4096
    tensor = torch.full((world * 5 * 512,), rank + 1.0, dtype=torch.float64)
    if rank == 1:
        dist.barrier()
    handle = channel.reduce_scatter(tensor, timeout=timedelta(seconds=20))
    assert handle.progress() == 0
    if rank == 0:
        assert not handle.poll() and handle.progress() == 0
        dist.barrier()
    seen = set()
    while not handle.poll():
        seen.add(handle.progress())
        time.sleep(1e-3)
    assert handle.progress() == 5 and seen <= set(range(5))
    assert tensor.view(world, -1)[rank].eq(3.0).all()
    dist.barrier()


def test_what_a_rank_adds_by_itself_is_no_wait() -> None:
    with patience(0.02):
        pool = BucketPool(torch.zeros(8))
        pool.begin_step()
        Scripted(pool, [1, 1, 1, None], look_s=0.03)
        assert pool.absorb_soon()


def test_steps_in_vain_are_followed_by_steps_that_do_not_wait_until_one_is_of_use() -> None:
    pool = BucketPool(torch.zeros(8))

    def steps(count: int, *, gives_up: bool) -> str:
        seen = ""
        for _ in range(count):
            pool.begin_step()
            waits = pool.most_patience_s == streamed_bucket.PATIENCE_S
            assert waits or pool.most_patience_s == 0
            seen += "w" if waits else "."
            pool.waited, pool.gave_up = waits, waits and gives_up
        return seen

    assert steps(16, gives_up=True) == "ww.w...w.......w"
    assert steps(16, gives_up=False) == "." * 15 + "w"
    assert steps(5, gives_up=True) == "ww.w."  # the last one's first wait was of use: as if nothing had been
    steps(500, gives_up=True)
    assert steps(64, gives_up=True).count("w") == 1


@ranks(2, timeout_s=30)
def test_on_a_slow_wire_no_whole_gradients_are_left_but_in_a_step_in_which_a_rank_is_late(
    rank: int, world: int
) -> None:
    """The waits of a step are longer than patience, none of them alone is; after a late step all is as before."""
    parallel_state.initialize_model_parallel()
    wire_s, patience_s, late_step = 0.14, 0.75, 1
    assert wire_s * (LAYERS - 2) > patience_s
    with patience(patience_s):
        ddp = wrap(
            Layers(),
            data_parallel_sharding_strategy="optim_grads",
            bucket_size=1,
            overlap_grad_reduce=True,
            share_host_memory=False,
            simulated_wire=Wire(wire_s, 1e12),
        )
        plain = Layers()
        plain.load_state_dict(ddp.module.state_dict())
        for step in range(3):
            ddp.zero_grad_buffer()
            plain.zero_grad()
            for r in range(world):
                (plain(inputs_of(r, step, 0), set()) / world).backward()
            loss = ddp(inputs_of(rank, step, 0), set())
            if step == late_step and rank == 1:
                time.sleep(1.2)
            loss.backward()
            left = sum(param.grad is not None for param in ddp.module.parameters())
            assert left > 0 if step == late_step and rank == 0 else left == 0, (step, left)
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), {name: param.grad for name, param in plain.named_parameters()})


@ranks(2, timeout_s=30)
@pytest.mark.parametrize("share", [False, True], ids=["sockets", "memory"])
def test_with_deterministic_reduction_a_late_rank_changes_no_bit(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()

    def make() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))

    def loss_of(module: nn.Module, r: int, microbatch: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * r + microbatch))
        loss: torch.Tensor = module(x.to(dtype)).square().sum()
        return loss

    plain = make().double()
    for r in range(world):
        for microbatch in range(3):
            (loss_of(plain, r, microbatch, torch.float64) / world).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    with patience(0.05):
        ddp = wrap(
            make(),
            data_parallel_sharding_strategy="optim_grads",
            bucket_size=1,
            overlap_grad_reduce=True,
            reduce_microbatches="every",
            deterministic_reduction=True,
            share_host_memory=share,
        )
        found = []
        for late in (False, True):
            ddp.zero_grad_buffer()
            for microbatch in range(3):
                if late and rank == 1 and microbatch == 1:
                    time.sleep(0.5)
                loss_of(ddp, rank, microbatch, torch.float32).backward()
            finalize_model_grads([ddp])
            found.append(whole_grads(ddp))
            assert_same(found[-1], expected, rtol=1e-5)
    assert all(torch.equal(found[0][name], found[1][name]) for name in expected)


@ranks(2, timeout_s=20)
@pytest.mark.parametrize("share", [False, True], ids=["sockets", "memory"])
@pytest.mark.parametrize("case", ["late", "two models", "unequal backwards"])
def test_a_step_that_is_saved_in_its_middle_holds_every_gradient(rank: int, world: int, case: str, share: bool) -> None:
    """A rank is late, or models share a wire, so that backward has not launched everything; or one had more of them."""
    parallel_state.initialize_model_parallel()
    plain = [Layers() for _ in range(2 if case == "two models" else 1)]
    before = {r: 2 if case == "unequal backwards" and r == 1 else 1 for r in range(world)}
    for number, module in enumerate(plain):
        torch.manual_seed(7 + number)
        for param in module.parameters():
            nn.init.normal_(param)
        for r in range(world):
            for n in range(before[r] + 1):
                (module(inputs_of(r, number, n), set()) / world).backward()

    def make() -> list[DistributedDataParallel]:
        modules = [Layers() for _ in plain]
        for module, source in zip(modules, plain, strict=True):
            module.load_state_dict(source.state_dict())
        options = {"data_parallel_sharding_strategy": "optim_grads", "reduce_microbatches": "every"}
        return [
            wrap(module, **options, bucket_size=1, overlap_grad_reduce=True, share_host_memory=share)
            for module in modules
        ]

    with patience(0.05):
        first = make()
        if case == "late" and rank == 1:
            time.sleep(0.5)
        for number, ddp in enumerate(first):
            for n in range(before[rank]):
                ddp(inputs_of(rank, number, n), set()).backward()
        saved = [ddp.reduced_so_far() for ddp in first]
        assert all(param.grad is None for ddp in first for param in ddp.module.parameters())
        dist.barrier()  # as writing a checkpoint has one
        second = make()
        for ddp, reduced in zip(second, saved, strict=True):
            ddp.restore_reduced(reduced)
        for models in (first, second):  # the step goes on, and from what was saved
            for number, ddp in enumerate(models):
                ddp(inputs_of(rank, number, before[rank]), set()).backward()
            for ddp, module in zip(models, plain, strict=True):
                finalize_model_grads([ddp])
                assert_same(whole_grads(ddp), {name: param.grad for name, param in module.named_parameters()})


@ranks(2, timeout_s=20)
def test_the_state_of_an_accumulation_holds_a_gradient_once_after_a_late_rank(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    with patience(0.05):
        options = {"data_parallel_sharding_strategy": "optim_grads", "reduce_microbatches": "every"}
        ddp = wrap(Layers(), **options, bucket_size=1, overlap_grad_reduce=True)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [ddp])
        optimizer, loader, _, _ = accumulate_gradient(ddp, optimizer, [inputs_of(rank, 0, 0)] * 2, 2)
        x = next(iter(loader))
        if rank == 1:
            time.sleep(0.5)
        optimizer.backward(ddp(x, set()))
        assert rank == 1 or any(param.grad is not None for param in ddp.module.parameters())
        state = optimizer.state_dict()["accumulation"]
        dist.barrier()
        assert state["gradients"] == {} and len(state["reduced"][0]) == LAYERS


def test_polling_does_nothing_of_a_reduction_before_the_same_of_an_earlier_one() -> None:
    channels, tensors = channels_of(2, 8)
    for rank, tensor in enumerate(tensors):
        tensor.fill_(rank + 1.0)
    mine = [channels[0].all_reduce(tensors[0][:4]), channels[0].reduce_scatter(tensors[0][4:])]
    assert not mine[1].poll() and [handle.stage for handle in mine] == [0, 0]
    real, looks = channels[0].has, []

    def comes_after_the_first_look(stage: int, number: int) -> bool:
        looks.append(number)
        return len(looks) > 1

    channels[0].has = comes_after_the_first_look  # type: ignore[method-assign]
    channels[0].poll(mine[1])
    assert looks == [1] and [handle.stage for handle in mine] == [0, 0]
    channels[0].has = real  # type: ignore[method-assign]
    theirs = [channels[1].all_reduce(tensors[1][:4])]
    assert not mine[1].poll() and [handle.stage for handle in mine] == [1, 0]
    theirs.append(channels[1].reduce_scatter(tensors[1][4:]))
    # The second one's only stage is its first, which the first one has done: it waits for no copies.
    assert not mine[1].poll() and [handle.stage for handle in mine] == [1, 1]
    assert theirs[1].poll() and [handle.stage for handle in theirs] == [2, 1] and not theirs[0].is_done()
    assert mine[1].poll() and mine[0].poll() and [handle.stage for handle in mine] == [2, 1]
    at_once([handle.wait for handle in (*mine, *theirs)])
    assert tensors[0].tolist() == [3.0] * 6 + [1.0] * 2
    assert tensors[1].tolist() == [3.0] * 4 + [2.0] * 2 + [3.0] * 2

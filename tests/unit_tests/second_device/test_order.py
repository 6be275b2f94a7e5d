"""The order check of the second device: small programs that are right or wrong on a GPU, and training in every way."""

import itertools
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard as fully_shard_folder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import core
from core import parallel_state
from core.checkpoint.snapshot import SnapshotMemory
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, Placement, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.second_device import device as second
from tests.unit_tests.second_device import left_out
from tests.unit_tests.second_device.conftest import Runner
from tests.unit_tests.second_device.order import RaceError, ordered
from tests.unit_tests.second_device.test_second_device import ENGINE, ON_HOST, QUARTERS, batch, layers

pytestmark = [
    pytest.mark.skipif(second.why_not() is not None, reason=str(second.why_not())),
    pytest.mark.timeout(600),
]


def raced(program: Callable[[], None], **names: torch.Tensor) -> str:
    try:
        with ordered(names):
            program()
    except RaceError as error:
        return str(error)
    return ""


# -- the instrument ---------------------------------------------------------------------------------------------------


def small_programs(device: torch.device) -> dict[str, tuple[str, str]]:
    """For each kind of order: the races of a program that keeps it, and of one that does not."""
    found = {}
    current = torch.accelerator.current_stream(device)
    side = torch.Stream(device)
    values, other = torch.zeros(8, device=device), torch.zeros(8, device=device)
    pinned = torch.zeros(8, pin_memory=True)

    def streams(waits: bool) -> None:
        values.fill_(1.0)
        if waits:
            side.wait_stream(current)
        with side:
            values.add_(1.0)
        if waits:
            current.wait_event(side.record_event())
        values.sum()

    def neighbours(apart: bool) -> None:
        with side:
            values[:4].fill_(1.0)
        values[4 if apart else 3 :].fill_(2.0)
        side.synchronize()

    def memory_that_is_freed(recorded: bool) -> None:
        fresh = torch.ones(300, device=device)
        side.wait_stream(current)
        with side:
            other.copy_(fresh[:8])
        if recorded:
            fresh.record_stream(side)
        del fresh
        torch.zeros(300, device=device)
        side.synchronize()

    def copy_to_pinned(waits: bool) -> None:
        pinned.copy_(values, non_blocking=True)
        if waits:
            current.synchronize()
        pinned.sum().item()

    def copy_from_pinned(waits: bool) -> None:
        values.copy_(pinned, non_blocking=True)
        if waits:
            current.record_event().synchronize()
        pinned.fill_(2.0)

    def collective(waits: bool) -> None:
        work = dist.all_reduce(values, async_op=True)
        if waits:
            work.wait()
        values.mul_(2.0)
        work.wait()

    for program in (streams, neighbours, memory_that_is_freed, copy_to_pinned, copy_from_pinned, collective):
        both = []
        for right in (True, False):
            torch.accelerator.synchronize(device)
            both.append(raced(lambda program=program, right=right: program(right), values=values))
        found[program.__name__] = both[0], both[1]
    return found


def test_programs_without_an_order_race_and_their_right_twins_do_not(run: Runner) -> None:
    words = {
        "streams": "values: aten::add.* in no order with an earlier access: aten::fill_ writes",
        "neighbours": "values: aten::fill_ writes 'self' on stream 0.*earlier access: aten::fill_ writes",
        "memory_that_is_freed": "aten::zero_ writes 'self' on stream 0.*: copy_ reads 'src' on stream",
        "copy_to_pinned": "aten::sum reads 'an argument' on the host.*: copy_ writes 'self' on stream 0",
        "copy_from_pinned": "aten::fill_ writes 'an argument' on the host.*: copy_ reads 'src' on stream 0",
        "collective": "values: aten::mul.* in no order with an earlier access: c10d::all_reduce writes",
    }

    found = run(small_programs, 2)
    assert found.keys() == words.keys()
    for name, (right, wrong) in found.items():
        assert right == "", name
        assert re.search(words[name], wrong, re.DOTALL), (name, wrong)
        assert "test_order.py" in wrong


def poisoned(device: torch.device) -> None:
    fresh = torch.empty(100, device=device)
    assert fresh.isnan().all() and torch.empty(100, dtype=torch.int64, device=device).eq(-1).all()
    view = torch.ones(100, device=device)
    place = view.data_ptr()
    del view
    again = torch.empty(100, device=device)
    assert again.data_ptr() == place and again.isnan().all()


def test_fresh_and_freed_memory_is_nan(run: Runner) -> None:
    run(poisoned, 1)


# -- training ---------------------------------------------------------------------------------------------------------


def trained_on_a_stream(device: torch.device, case: Any, steps: int = 2) -> None:
    """Train with the forwards and backwards on a user's stream, the rest on another one."""
    options, of_optimizer, dtype, offloaded = case
    placement = Placement(**offloaded) if offloaded else None
    config = DistributedDataParallelConfig(**options, placement=placement)
    model = DistributedDataParallel(None, config, layers(device, dtype))
    optimizer: Any = get_megatron_optimizer(
        OptimizerConfig(**{"lr": 0.05, "bf16": dtype == torch.bfloat16, **of_optimizer}), [model]
    )
    side, current = torch.Stream(device), torch.accelerator.current_stream(device)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(2):
            x = batch(2 * step + number, device)
            side.wait_stream(current)
            x.record_stream(side)
            with side:
                loss = (model(x.to(dtype)).float() - x).square().mean()
                optimizer.scale_loss(loss).backward()
            current.wait_stream(side)
        finalize_model_grads([model])
        optimizer.step()


def all_on_a_stream(device: torch.device, cases: dict[str, Any]) -> dict[str, str]:
    """The races of each case that has some."""
    parallel_state.initialize_model_parallel()
    races = {}
    for name, case in cases.items():
        words = raced(lambda case=case: trained_on_a_stream(device, case))  # type: ignore[misc]
        if words:
            races[name] = words
    parallel_state.destroy_model_parallel()
    return races


@pytest.mark.parametrize("cases", QUARTERS.values(), ids=QUARTERS)
@pytest.mark.in_suite(1)
def test_a_forward_on_a_stream_of_the_users_is_followed(run: Runner, cases: dict[str, Any]) -> None:
    assert run(all_on_a_stream, 2, cases) == {}


class Branches(nn.Module):
    """Two layers of one bucket, each computed on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.one, self.other, self.last = (nn.Linear(8, 8, device=device) for _ in range(3))
        self.streams = [torch.Stream(device), torch.Stream(device)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current = torch.accelerator.current_stream(x.device)
        outputs = []
        for stream, layer in zip(self.streams, (self.one, self.other), strict=True):
            stream.wait_stream(current)
            with stream:
                outputs.append(layer(x))
                x.record_stream(stream)
            current.wait_stream(stream)
        for output in outputs:
            output.record_stream(current)
        return self.last(outputs[0] * outputs[1])


def two_producers(device: torch.device, strategy: str, overlap: bool) -> str:
    parallel_state.initialize_model_parallel()
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap)
    model = DistributedDataParallel(None, config, Branches(device))
    optimizer: Any = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.05), [model])

    def steps() -> None:
        for number in range(3):
            optimizer.zero_grad()
            model(batch(number, device)).square().mean().backward()
            finalize_model_grads([model])
            optimizer.step()

    names = {f"gradients {n}": buffer.grad_data for n, buffer in enumerate(model.engine.buffers)}
    try:
        return raced(steps, **names)
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.in_suite(3)
def test_a_bucket_waits_for_all_streams_that_produce_its_gradients(run: Runner, strategy: str, overlap: bool) -> None:
    assert run(two_producers, 2, strategy, overlap) == ""


def other_loops(device: torch.device) -> dict[str, str]:
    """The races of a compiled model, and of two models with one optimizer, for each strategy that has some."""
    parallel_state.initialize_model_parallel()
    races = {}
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        options = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": True, "bucket_size": 500}
        config = DistributedDataParallelConfig(**options)
        models = [DistributedDataParallel(None, config, layers(device)) for _ in range(2)]
        optimizer: Any = get_megatron_optimizer(OptimizerConfig(lr=0.05), models)
        first, second_model = torch.compile(models[0], backend="aot_eager"), models[1]

        def steps(first: Any = first, other: Any = second_model, optimizer: Any = optimizer) -> None:
            for number in range(3):
                optimizer.zero_grad()
                x = batch(number, device)
                (other(first(x)) - x).square().mean().backward()
                finalize_model_grads([first._orig_mod, other])
                optimizer.step()

        words = raced(steps)
        if words:
            races[strategy] = words
    parallel_state.destroy_model_parallel()
    return races


def test_a_compiled_model_and_two_models_are_in_order(run: Runner) -> None:
    assert run(other_loops, 2) == {}


# -- a call that is left out ------------------------------------------------------------------------------------------

PLACES = [
    place
    for place in left_out.places(Path(core.__file__).parent, "core")
    if place.module.startswith(("core.distributed", "core.optimizer", "core.checkpoint"))
]
PLACES += [
    place
    for place in left_out.places(Path(core.__file__).parent, "core", ["wait"])
    if place.function in ("Handle.wait", "Gather.wait")
]


IN_BF16 = {"use_distributed_optimizer": True, "grad_communication_dtype": torch.bfloat16, "overlap_grad_reduce": True}


def every_way(device: torch.device) -> str:
    """Races of programs that between them make every kind of copy and wait."""
    parallel_state.initialize_model_parallel()
    cases = [ON_HOST[f"{strategy}, torch.bfloat16"] for strategy in ("optim", "optim_grads_params")]
    cases += [ON_HOST["gradients, reduced every, torch.float32"], ENGINE["offloaded whole, with copies ahead"]]
    cases += [(IN_BF16, {}, torch.float32, {})]
    words = ""
    for case in cases:
        words += raced(lambda case=case: trained_on_a_stream(device, case, 4))  # type: ignore[misc]
    words += raced(lambda: snapshot_while_training(device))
    words += raced(lambda: measured(device))
    words += raced(lambda: written_after_a_forward(device))
    parallel_state.destroy_model_parallel()
    words += two_producers(device, "no_shard", True)
    return words


def snapshot_while_training(device: torch.device) -> None:
    """A snapshot is taken, and the next step writes what it was taken of."""
    memory = SnapshotMemory()
    values = torch.ones(64, device=device)
    copies = memory.take([values])
    values.add_(1.0)
    assert copies[0].sum().item() == 64.0


def measured(device: torch.device) -> None:
    """Times of collectives are read while the device may still be at work."""
    model = DistributedDataParallel(None, DistributedDataParallelConfig(overlap_grad_reduce=True), layers(device))
    for step in range(4):  # the host waits in watched steps
        model.zero_grad_buffer()
        model(batch(step, device)).square().mean().backward()
        finalize_model_grads([model])
    assert all(event.exposed_s >= 0.0 and event.done_s is not None for event in model.step_report().events)


def written_after_a_forward(device: torch.device) -> None:
    """Shards on the host are written, as a load does, while the device may still be copying them."""
    options, _, dtype, placed = ON_HOST["parameters alone, bf16"]
    config = DistributedDataParallelConfig(**options, placement=Placement(**placed))
    model = DistributedDataParallel(None, config, layers(device, dtype))
    with torch.no_grad():
        model(batch(0, device).to(dtype))
    model.engine.params.begin_update()
    for unit in model.engine.params.units:
        unit.shard.zero_()


def without(device: torch.device, place: left_out.Place) -> str:
    with left_out.left_out(place):
        try:
            return every_way(device)
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.in_suite(1)
def test_a_synchronization_that_is_left_out_is_a_race(run: Runner, place: left_out.Place) -> None:
    words = run(without, 2, place) or run(without, 1, place)
    assert "in no order" in words or "must be completed before calculating elapsed time" in words


def on_another_stream(device: torch.device) -> str:
    """Races of training whose gradients are reduced by calls on a stream that waits for nothing."""
    right, elsewhere = dist.all_reduce, torch.Stream(device)

    def wrong(*arguments: Any, **options: Any) -> Any:
        with elsewhere:
            return right(*arguments, **options)

    with mock.patch.object(dist, "all_reduce", wrong):
        return two_producers(device, "no_shard", True)


def test_a_collective_on_the_wrong_stream_is_a_race(run: Runner) -> None:
    assert re.search("c10d::all_reduce writes .* in no order with an earlier access", run(on_another_stream, 2))


def test_all_calls_of_the_engine_together_are_in_order(run: Runner) -> None:
    assert run(every_way, 2) == ""


# -- the host ----------------------------------------------------------------------------------------------------------


def waits_of_a_step(device: torch.device, cases: list[Any]) -> list[list[str]]:
    """For each case, where the host waits for the device between the first forward and the end of step()."""
    parallel_state.initialize_model_parallel()
    found = []
    for strategy, dtype, overlap in cases:
        options = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": overlap, "bucket_size": 500}
        model = DistributedDataParallel(None, DistributedDataParallelConfig(**options), layers(device, dtype))
        optimizer: Any = get_megatron_optimizer(OptimizerConfig(lr=0.05, bf16=dtype == torch.bfloat16), [model])
        for number in range(4):  # the host waits in watched steps
            x = batch(number, device).to(dtype)
            optimizer.zero_grad()
            with ordered() as order:
                model(x).float().square().mean().backward()
                finalize_model_grads([model])
                optimizer.step()
        found.append(order.waits)
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.in_suite(1)
def test_a_step_waits_for_the_device_once(run: Runner, strategy: str) -> None:
    """The docs promise it: for the norm. A comparison of weights in 16 bits has waited once a parameter."""
    cases = list(itertools.product([strategy], (torch.float32, torch.bfloat16), (False, True)))
    for case, waits in zip(cases, run(waits_of_a_step, 2, cases), strict=True):
        assert len(waits) == 1 and "clip_grads.py" in waits[0], (case, waits)


# -- programs of torch ------------------------------------------------------------------------------------------------


def of_torch(device: torch.device, kind: str, place: left_out.Place | None = None) -> str:
    """Races of training under torch DDP or FSDP2. place: a call of torch's to leave out."""
    model: nn.Module = Branches(device) if kind == "ddp" else layers(device)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh(device.type, (2,))
        for child in model.children():
            fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for number in range(3):
            optimizer.zero_grad()
            model(batch(number, device)).square().mean().backward()
            optimizer.step()

    with left_out.left_out(place) if place is not None else nullcontext():
        return raced(steps)


def test_programs_of_torchs_wrappers_run_on_the_device_and_are_in_order(run: Runner) -> None:
    assert run(of_torch, 2, "ddp") == ""
    assert run(of_torch, 2, "fsdp2") == ""


@pytest.mark.nightly
def test_a_wait_that_fsdp2_leaves_out_is_a_race(run: Runner) -> None:
    """FSDP2 gathers on streams of its own, so a check that sees nothing there would be blind."""
    folder = Path(fully_shard_folder.__file__).parent
    places = left_out.places(folder, fully_shard_folder.__name__, ["wait_stream", "wait_event"])
    found = [place for place in places if "foreach" in place.function and run(of_torch, 2, "fsdp2", place)]
    assert found

"""`python -m core.verify train.py` finds what a program does wrong, in any wrapper, and alarms at no right one."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.verify import note
from core.verify.program import Asked, ProgramWatch, asked_by, function_named, run_program
from core.verify.report import GradientReport
from tests.unit_tests.ranks import ranks

MICROBATCHES = 3


class Net(nn.Module):
    """Its forward gives the mean loss, unless it is given no targets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.down(torch.tanh(self.up(self.norm(x))))
        return out if y is None else (out - y).square().mean()


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def build_whole() -> nn.Module:
    return Net()


WHOLE = f"{__name__}:build_whole"


def report_of(program: Callable[[], None], **asked: Any) -> GradientReport:
    """Run a program, which is to end after its first step."""
    watch = ProgramWatch(Asked("a program", **asked))
    with watch.active(), pytest.raises(SystemExit) as end:
        program()
    (report,) = watch.reports
    assert end.value.code == (0 if report.ok else 1)
    return report


def data_of(seed: int, shape: tuple[int, ...] = (5, 6)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randn(*shape, generator=generator) for _ in range(MICROBATCHES)]
    return [(x, x[..., :4].sin() + 1.0) for x in draws]


def train(
    model: Any,
    *,
    fault: str = "",
    forward: Callable[..., Tensor] | None = None,
    seed: int | None = None,
    clip: float | None = None,
) -> None:
    """A user's loop around any wrapper, with a mistake."""
    ours = isinstance(model, DistributedDataParallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = forward or model
    for _ in range(2):
        for number, (x, y) in enumerate(data_of(dist.get_rank() if seed is None else seed)):
            is_last = number == MICROBATCHES - 1
            loss = forward(x, y) / MICROBATCHES
            if fault == "divided twice":
                loss = loss / MICROBATCHES
            if fault == "divided by the world":
                loss = loss / dist.get_world_size()
            if fault == "forgotten microbatch" and number == 1:
                continue
            if fault == "zeroed too late" and is_last:
                model.zero_grad_buffer() if ours else model.zero_grad()
            with nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
                loss.backward()
        if ours:
            finalize_model_grads([model])
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def wrapped_by(kind: str) -> Any:
    torch.manual_seed(4)
    model = Net()
    if kind == "DDP of torch":
        return nn.parallel.DistributedDataParallel(model)
    if kind in ("fully_shard", "fully_shard in bf16"):
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = mixed if kind.endswith("bf16") else MixedPrecisionPolicy()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.up, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    options: dict[str, Any] = {"data_parallel_sharding_strategy": kind}
    config = DistributedDataParallelConfig(initial_weights="broadcast", **options)
    return DistributedDataParallel(None, config, model)


KINDS = ("no_shard", "optim_grads_params", "DDP of torch", "fully_shard", "fully_shard in bf16")


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_program_is_right_under_any_wrapper(rank: int, world: int, kind: str) -> None:
    parallel_state.initialize_model_parallel()
    try:
        torch_clips = 0.01 if kind in KINDS[2:] else None
        asked = {"whole": WHOLE} if kind.startswith("fully_shard") else {}
        report = report_of(lambda: train(wrapped_by(kind), clip=torch_clips), **asked)
        assert report.ok and report.parameters == 6, report
        assert report.largest_error < (0.05 if kind.endswith("bf16") else 1e-5)
    finally:
        parallel_state.destroy_model_parallel()


FAULTS = {
    "divided twice": "3 times too small, the number of microbatches: divided by it twice",
    "divided by the world": "dp times too small (dp is 2): 1/n twice",
    "forgotten microbatch": "",
    "zeroed too late": "",
}


@ranks(2)
@pytest.mark.in_suite()
@pytest.mark.parametrize("kind", ["no_shard", "DDP of torch", "fully_shard"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_of_the_loop_is_found_under_any_wrapper(rank: int, world: int, kind: str, fault: str) -> None:
    parallel_state.initialize_model_parallel()
    try:
        report = report_of(lambda: train(wrapped_by(kind), fault=fault), whole=WHOLE)
        # After a forward, zero_grad does not reach the root's parameters, which fully_shard has not resharded.
        reached = 2 if (kind, fault) == ("fully_shard", "zeroed too late") else 6
        assert len({entry.name for entry in report.wrong}) == reached
        assert FAULTS[fault] in report.cause
    finally:
        parallel_state.destroy_model_parallel()


def split_by_torch(*, forgets: bool) -> nn.Module:
    """A DTensor-parallel model; where it forgets, the norm is no DTensor, and its ranks have parts of the rows."""
    torch.manual_seed(4)
    model = Net()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    if not forgets:
        plan["norm"] = SequenceParallel(sequence_dim=0)
    model.norm.register_forward_pre_hook(lambda _, args: (args[0].chunk(2)[dist.get_rank()],))
    return parallelize_module(model, mesh, plan)


@ranks(2)
@pytest.mark.parametrize("forgets", [False, True])
def test_a_forgotten_reduction_in_a_dtensor_parallel_model_is_found(rank: int, world: int, forgets: bool) -> None:
    model = split_by_torch(forgets=forgets)
    assert isinstance(model.get_parameter("up.weight"), DTensor)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x, y = x[:4], y[:4]
        note(mean_loss, x, y)
        return mean_loss(model, x, y)

    report = report_of(lambda: train(model, forward=loss, seed=7), whole=WHOLE)
    assert report.ok != forgets, report
    if forgets:
        assert {entry.name for entry in report.wrong} == {"norm.weight", "norm.bias"}
        assert "not reduced over tp" in report.cause


@ranks(2)
def test_a_program_goes_on_where_it_is_asked_to(rank: int, world: int) -> None:
    torch.manual_seed(4)
    watch = ProgramWatch(Asked("a program", continues=True))
    with watch.active():
        model = nn.parallel.DistributedDataParallel(Net())
        before = model.module.up.weight.detach().clone()
        train(model)
    torch.manual_seed(4)
    alone = nn.parallel.DistributedDataParallel(Net())
    train(alone)
    assert len(watch.reports) == 1
    assert not torch.equal(before, model.module.up.weight)
    assert torch.equal(alone.module.up.weight, model.module.up.weight)


@ranks(2)
def test_what_is_not_known_is_asked_for(rank: int, world: int) -> None:
    model = split_by_torch(forgets=False)
    with ProgramWatch(Asked("a program")).active(), pytest.raises(ValueError, match="--whole module:function"):
        train(model, seed=7, forward=lambda x, y: mean_loss(model, x[:4], y[:4]))
    with ProgramWatch(Asked("a program")).active(), pytest.raises(ValueError, match="gives a Tensor of shape .*--loss"):
        plain = nn.parallel.DistributedDataParallel(Net())
        train(plain, forward=lambda x, y: mean_loss(plain, x, y))


def test_the_command_line_ends_at_the_program() -> None:
    asked = asked_by(["--whole", "m:f", "--go-on", "-m", "core.finetune", "--loss", "3"])
    assert asked == Asked("core.finetune", ("--loss", "3"), True, "m:f", continues=True)
    assert function_named(WHOLE) is build_whole
    with pytest.raises(ValueError, match="has no 'nothing'"):
        function_named(f"{__name__}:nothing")


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_program(Asked(str(tmp_path / "train.py"))) == 2
    assert re.search("there is no file .*train.py", capsys.readouterr().err)

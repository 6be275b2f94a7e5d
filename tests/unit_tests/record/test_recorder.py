"""record_with: one sketch in any layout, of any wrapper; nothing on other steps; failures that all ranks share."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from core import parallel_state
from core.checkpoint.boxes import Split, split_boxes
from core.checkpoint.global_slices import GlobalSlice
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.verify.asked import asked_by
from core.verify.gathered import slice_of
from core.verify.record import compare_recordings, record_with
from core.verify.record.compare import main
from core.verify.record.file import added, read_recording
from core.verify.record.program import record_program
from core.verify.record.sketches import LINEAR, PROJECTIONS, ROWS, Sketch, entries_of, of_part, of_rows, signs
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import make_net

CPU = torch.device("cpu")


def numbers_of(*sketches: Sketch) -> Tensor:
    return torch.tensor(added(entries_of(sketches)).numbers, dtype=torch.float64)


def test_sketches_of_parts_add_up_to_the_sums_over_the_full_tensor() -> None:
    full = torch.randn(8, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    vectors = [signs(length, dim, CPU, torch.float64) for dim, length in enumerate(full.shape)]
    want = torch.einsum("abc,ak,bk,ck->k", full, *vectors)
    found = torch.zeros(1 + PROJECTIONS, dtype=torch.float64)
    for row, column in itertools.product(range(2), range(3)):
        splits = [Split(0, 2, row, stride=2), Split(1, 3, column)]
        shape, boxes = split_boxes((4, 2, 5), splits)
        place = GlobalSlice("w", "w", shape, (4, 2, 5), boxes, (), 1, 0)
        flat = slice_of(place, full).reshape(-1)
        for first, last in ((0, 13), (13, 14), (14, 40)):  # the shards of three data ranks
            found += numbers_of(*of_part(flat[first:last], first, place))
    torch.testing.assert_close(found, torch.cat([full.square().sum()[None], want]))


def test_a_sketch_of_rows_does_not_depend_on_who_has_which() -> None:
    full = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = numbers_of(of_rows(full))
    halves = numbers_of(of_rows(full[:2]), of_rows(full[2:].transpose(0, 1)))
    for some in (slice(0, 1), LINEAR, ROWS):
        torch.testing.assert_close(halves[some], whole[some])
    columns = [(torch.arange(8)[start::2], torch.arange(4)) for start in (0, 1)]
    parts = numbers_of(*(of_rows(full[..., there], width=8, columns=(there, here)) for there, here in columns))
    torch.testing.assert_close(parts, whole[: LINEAR.stop])


def data_of(step: int, world: int) -> tuple[Tensor, Tensor]:
    """A global batch, other samples for every rank."""
    x = torch.randn(6 * world, 5, generator=torch.Generator().manual_seed(step))
    return x, x[:, :3].sin()


def train(path: Path, wrap: Callable[[nn.Module], Any], *, fault: bool = False, **options: Any) -> None:
    """Three steps of SGD in any wrapper."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = wrap(make_net(torch.float32))
    ours = isinstance(model, DistributedDataParallel)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if ours:
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="sgd", lr=0.1, weight_decay=0.0, sgd_momentum=0.0, clip_grad=0.0), [model]
        )
    with record_with(model, optimizer, path, **options):
        for step in range(1, 4):
            x, y = data_of(step, world)
            mine = slice(6 * rank, 6 * rank + 6)
            if ours:
                model.zero_grad_buffer()
            else:
                optimizer.zero_grad()
            loss = (model(x[mine]) - y[mine]).square().mean()
            (loss * (2 if fault and step == 2 else 1)).backward()
            if ours:
                finalize_model_grads([model])
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()


def ours(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(None, DistributedDataParallelConfig(), model)


class Outer(nn.Module):
    """The same model under other names."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@ranks(2)
def test_runs_of_torch_are_compared_with_ours(rank: int, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()
    train(tmp_path / "ours", ours)
    parallel_state.destroy_model_parallel()
    train(tmp_path / "ddp", lambda net: TorchDDP(Outer(net)))
    train(tmp_path / "fsdp", lambda net: fully_shard(net) and net)
    train(tmp_path / "fault", TorchDDP, fault=True)
    if rank == 0:
        names = {r"^net\.": "", "^net$": ""}
        assert compare_recordings(tmp_path / "ours", tmp_path / "ddp", names).ok
        assert compare_recordings(tmp_path / "ours", tmp_path / "fsdp").ok
        assert compare_recordings(tmp_path / "fsdp", tmp_path / "ddp", names).ok
        found = compare_recordings(tmp_path / "ours", tmp_path / "fault")
        assert (found.step, found.kind) == (2, "gradient") and "2 times the first run's" in str(found)
        first = read_recording(tmp_path / "ddp").steps[1].tables
        assert {"net.first", "net.third"} <= first["outputs"].keys() == first["gradients"].keys()
        with pytest.raises(ValueError, match="no parameter in common.*net.first.weight"):
            compare_recordings(tmp_path / "ours", tmp_path / "ddp")


class Full:
    """A file on a disk that is full."""

    def write(self, _: str) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        pass


@ranks(2)
def test_failures_to_write_are_shared(rank: int, tmp_path: Path) -> None:
    model = TorchDDP(make_net(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="every=0"):
        record_with(model, optimizer, tmp_path / "a", every=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        record_with(model, optimizer, tmp_path / "file" / "a")
    with warnings.catch_warnings(record=True) as warned, record_with(model, optimizer, tmp_path / "b") as recording:
        recording.file = Full() if rank == 0 else None  # type: ignore[assignment]
        for step in (1, 2):
            model(data_of(step, 2)[0]).sum().backward()
            optimizer.step()
        assert "No space left" in recording.failure, "on both ranks"
    assert "step" not in vars(optimizer)
    assert any("training continues" in str(warning.message) for warning in warned) == (rank == 0)


def hooks_of(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_other_steps_have_no_hooks(tmp_path: Path) -> None:
    """Without torch.distributed, and with a scheduler of torch, which expects `step` to be a method."""
    model = make_net(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    with record_with(model, optimizer, tmp_path / "a", every=3, first_step=4):
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        for step in range(4, 9):
            seen.append(hooks_of(model) > 0)
            model(data_of(step, 1)[0]).sum().backward()
            optimizer.step()
            scheduler.step()
    assert seen == [True, False, False, True, False] and not hooks_of(model)
    assert [*read_recording(tmp_path / "a").steps] == [4, 7]


class WithMask(Outer):
    """A model that some loops call with a mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.net(x)


def test_other_data_is_seen_among_other_arguments(tmp_path: Path) -> None:
    for name, shift, more in (("a", 0.0, ()), ("masked", 0.0, (torch.ones(3),)), ("other", 1.0, (torch.ones(3),))):
        model = WithMask(make_net(torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record_with(model, optimizer, tmp_path / name):
            model(data_of(1, 1)[0] + shift, *more).sum().backward()
            optimizer.step()
    assert compare_recordings(tmp_path / "a", tmp_path / "masked").ok
    assert compare_recordings(tmp_path / "a", tmp_path / "other").kind == "data"


PROGRAM = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.randn(5, 6)).square().mean().backward()
    if step == 2 and "zero" in sys.argv:
        model[2].weight.grad.zero_()
    optimizer.step()
"""


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["python"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    program, one, two = tmp_path / "program.py", str(tmp_path / "one"), str(tmp_path / "run" / "record.jsonl")
    program.write_text(PROGRAM)
    assert record_program(asked_by(["--record", one, str(program)])) == 0
    assert record_program(asked_by(["--record", two, "--every", "2", str(program), "zero"])) == 0
    assert main([one, one]) == 0 and "equal bit for bit" in capsys.readouterr().out
    assert main([one, str(tmp_path / "run")]) == 1, "of two recordings, one in the directory of a run"
    assert "step 3, gradient: right at the output of `2`, and `2.weight` differs" in capsys.readouterr().out

    with open(one, "a") as file:
        file.write('{"step": 4, "out')  # the run was killed, and resumed
        file.write('\n{"recording":1,"layout":"resumed"}\n')
    assert main([one, one]) == 0
    empty = tmp_path / "empty"
    empty.write_text("")
    for run, words in (
        (tmp_path / "none", "none does not exist (from "),
        (tmp_path, "record.jsonl does not exist"),
        (empty, "has no step"),
        (program, "is no line of a recording"),
    ):
        assert main([one, str(run)]) == 2
        assert words in capsys.readouterr().err
    assert main([one, one, "--names", "["]) == 2
    assert main([one, one, "--names", "[=x"]) == 2 and "no regular expression" in capsys.readouterr().err
    program.write_text("pass")
    assert record_program(asked_by(["--record", one, str(program)])) == 1
    assert "no step is recorded" in capsys.readouterr().err


def test_runs_without_a_common_step_are_refused(tmp_path: Path) -> None:
    for name, first in (("a", 1), ("b", 2)):
        model = make_net(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record_with(model, optimizer, tmp_path / name, first_step=first, every=2 if first == 1 else 1):
            model(data_of(1, 1)[0]).sum().backward()
            optimizer.step()
    with pytest.raises(ValueError, match=r"no step in common: step 1 and step 2"):
        compare_recordings(tmp_path / "a", tmp_path / "b")

"""The table of habits on the page for those who come from elsewhere: links lead somewhere, and rows are true."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, anchors

SOURCE = ROOT / "docs" / "source"


def rows() -> list[list[str]]:
    table = (SOURCE / "coming_from.md").read_text().partition("## Habits")[2]
    found = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found]
    return [row for row in cells if row[0] != "you expect"]


def test_the_table_has_no_empty_cell_and_its_links_lead_somewhere() -> None:
    assert len(rows()) > 20
    for row in rows():
        assert len(row) == 3 and all(len(cell) > 1 for cell in row), row
        for name, anchor in re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", row[2]):
            assert not anchor or anchor in anchors(SOURCE / name), f"{row[0]}: {name} has no heading {anchor}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(nn.functional.gelu(checkpoint(self.first, x, use_reentrant=False)))


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def backward(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs(dist.get_rank())).float().square().mean()
    loss.backward()
    finalize_model_grads([model])


@ranks(2)
def test_habits_of_other_libraries_work_with_whole_gradients(rank: int, world: int, tmp_path: Path) -> None:
    """Clipping, editing `.grad`, autocast, schedulers, EMA, functional_call, saves, and torch.compile on both sides."""
    parallel_state.initialize_model_parallel()
    start = Net()
    model = DistributedDataParallel(None, DistributedDataParallelConfig(overlap_grad_reduce=True), Net())
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.05, clip_grad=0.0), [model])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        clipped = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(clipped, torch.tensor(0.1), rtol=1e-4, atol=0)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model.module)
    assert optimizer.param_groups[0]["lr"] == 0.05 / 4

    torch.save(model.state_dict(), tmp_path / f"weights{rank}.pt")
    plain = Net()
    plain.load_state_dict(torch.load(tmp_path / f"weights{rank}.pt"))
    for ours, loaded, before in zip(model.parameters(), plain.parameters(), start.parameters(), strict=True):
        assert torch.equal(ours, loaded) and not torch.equal(ours, before)
    averages = dict(average.module.named_parameters())
    assert all(not torch.equal(averages[name], value) for name, value in plain.named_parameters())
    assert sorted(get_model_state_dict(model)) == sorted(plain.state_dict())
    weights = {f"module.{name}": value for name, value in start.state_dict().items()}
    torch.testing.assert_close(functional_call(model, weights, (inputs(rank),)), start(inputs(rank)))

    outside = torch.compile(model, backend="eager")
    inside = copy.deepcopy(model.module)
    inside.compile(backend="eager")
    wrapped_after = DistributedDataParallel(None, DistributedDataParallelConfig(), inside)
    optimizer.zero_grad()
    for compiled in (outside, wrapped_after):
        backward(compiled)
    for other in range(world):
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain(inputs(other)).float().square().mean() / world
        loss.backward()
    for held in (model, wrapped_after):
        for ours, theirs in zip(held.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-2 * float(theirs.grad.abs().max()), rtol=0)


@ranks(2)
def test_parameters_that_are_frozen_before_the_wrap_stay(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    start, frozen = Net(), Net()
    frozen.first.requires_grad_(False)
    adapted = DistributedDataParallel(None, DistributedDataParallelConfig(use_distributed_optimizer=True), frozen)
    backward(adapted)
    get_megatron_optimizer(OptimizerConfig(lr=0.05), [adapted]).step()
    assert torch.equal(frozen.first.weight, start.first.weight)
    assert not torch.equal(frozen.second.weight, start.second.weight)

"""A model that user code has split, with no attribute and no DTensor: `declare_splits` says where its parts lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.distributed import DistributedDataParallel
from core.verify import GradientReport, WrongGradientError, check_gradients, declare_splits, verify_with
from tests.unit_tests.ranks import ranks
from tests.unit_tests.verify.silent_bugs import Copy, Sum

SPLITS: dict[str, Any] = {"*.gate_value.weight": (0, 2), "block.down.weight": 1}


class Gated(nn.Module):
    """A gated product of 8 channels, over the ranks of a group. forgets: the gradients of its input are not added."""

    def __init__(self, group: Any, ranks: int, forgets: bool) -> None:
        super().__init__()
        self.group, self.bug = group, "overlap" if forgets else ""
        self.gate_value = nn.Linear(6, 16 // ranks, bias=False)
        self.down = nn.Linear(8 // ranks, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.group is not None:
            x = Copy.apply(x, self.group, self.bug)
        gate, value = self.gate_value(x).chunk(2, dim=-1)
        out = self.down(torch.tanh(gate) * value)
        return out if self.group is None else Sum.apply(out, self.group)


class Net(nn.Module):
    """The norm is whole on all ranks."""

    def __init__(self, group: Any = None, ranks: int = 1, forgets: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(6)
        torch.manual_seed(3 + (dist.get_rank() if group is not None else 0))
        self.block = Gated(group, ranks, forgets)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.block(self.norm(x)) - y).square().mean()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y)


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(8))
    return x, x[:, :4].sin() + 1.0


def first_step(splits: dict[str, Any], forgets: bool = False) -> GradientReport | None:
    """A loop around torch's DDP, where each rank is a data group of its own. The report; None if it was not right."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    split = declare_splits(Net(dist.group.WORLD, 2, forgets), splits)
    model = nn.parallel.DistributedDataParallel(split, process_group=alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    check = verify_with(model, Net, loss_of)
    model(*batch()).backward()
    try:
        optimizer.step()
    except WrongGradientError as error:
        assert "wrong: norm; right: 2 of 4" in str(error), str(error)
        return None
    return check.report


@ranks(2)
def test_a_declared_split_is_compared_part_by_part(rank: int, world: int) -> None:
    report = first_step(SPLITS)
    assert report is not None and report.parameters == 4 and report.largest_error < 1e-5, str(report)
    assert first_step(SPLITS, forgets=True) is None
    with pytest.raises(
        ValueError, match=r"'block.gate_value.weight' has shape \[8, 12\] gathered from the ranks and \[16, 6\]"
    ):
        first_step({**SPLITS, "*.gate_value.weight": 1})


@ranks(2)
def test_check_gradients_takes_a_declared_split(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    for forgets in (False, True):
        report = check_gradients(
            lambda forgets=forgets: declare_splits(Net(group, 2, forgets), SPLITS),
            lambda model, part: model(*part),
            batch(),
            reference_fn=Net,
        )
        assert report.ok != forgets and report.parameters == 4, str(report)
        assert {entry.name for entry in report.wrong} == ({"norm.weight", "norm.bias"} if forgets else set())


REFUSED = {
    "no name": ({"block.up.weight": 0}, r"'block.up.weight' is no parameter of this model; it has 'norm.weight'"),
    "no dimension": ({"norm.weight": 1}, r"'norm.weight' of shape \[6\] has no dimension 1"),
    "sections": ({"block.down.weight": (1, 3)}, r"dimension 1 of shape \[4, 8\] does not divide into 3 sections"),
    "twice": ({"norm.*": 0, "norm.bias": 0}, r"'norm.bias' is declared twice: by 'norm.\*'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_split_that_does_not_fit_is_refused_by_name_and_marks_nothing(name: str) -> None:
    splits, words = REFUSED[name]
    model = Net()
    with pytest.raises(ValueError, match=words):
        declare_splits(model, {"block.gate_value.weight": 0, **splits})
    assert not any(hasattr(param, "tensor_model_parallel") for param in model.parameters())


@ranks(1)
def test_a_model_in_our_wrapper_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    with pytest.raises(ValueError, match="call it before the wrap"):
        declare_splits(DistributedDataParallel(module=Net()), SPLITS)

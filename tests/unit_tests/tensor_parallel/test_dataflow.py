"""Dataflow: what one forward shows of whole parameters next to split ones. One process; the seams are given by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.tensor_parallel.dataflow import Dataflow


class Model(nn.Module):
    """`split` stands for this rank's slice; `norm`, `other` and `first` are whole."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.split = nn.Parameter(torch.randn(4, 4))
        self.norm = nn.Parameter(torch.ones(4))
        self.other = nn.Parameter(torch.ones(4))
        self.body = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def flow_of(forward: Callable[[Any, Tensor], Tensor]) -> Dataflow:
    model = Model(lambda model, x: forward(model, model.first(x)))
    flow = Dataflow(model, [model.split])
    model.flow = flow
    with flow:
        model(torch.randn(2, 4, requires_grad=True))  # it learns and is no parameter: an activation
    flow.close()
    return flow


def copied(model: Any, x: Tensor) -> Tensor:
    return model.flow.enter(x, x)


def reduced(model: Any, x: Tensor) -> Tensor:
    result = x.detach().clone().requires_grad_()
    model.flow.leave(x, result)
    return result


@pytest.mark.parametrize(
    ("forward", "partial", "complete"),
    [
        pytest.param(lambda m, x: (copied(m, x) @ m.split) * m.norm, {"norm"}, {"first.weight"}, id="norm of heads"),
        pytest.param(
            lambda m, x: (copied(m, x) @ m.split) * (1 + m.norm.float()), {"norm"}, {"first.weight"}, id="1 + weight"
        ),
        pytest.param(
            lambda m, x: copied(m, x * m.norm) @ m.split, set(), {"norm", "first.weight"}, id="before the seam"
        ),
        pytest.param(
            lambda m, x: reduced(m, copied(m, x) @ m.split) * m.norm * x, set(), {"norm", "first.weight"}, id="after it"
        ),
        pytest.param(
            lambda m, x: (copied(m, x) * m.norm) @ m.split, {"norm"}, {"first.weight"}, id="of a copied input"
        ),
        pytest.param(
            lambda m, x: torch.zeros(2, 4).index_add_(0, torch.arange(2), copied(m, x) @ m.split) * m.norm,
            *({"norm"}, {"first.weight"}),
            id="written in place",
        ),
        pytest.param(
            lambda m, x: (copied(m, x) @ m.split).chunk(2, -1)[0].contiguous().view(-1) * m.norm,
            *({"norm"}, {"first.weight"}),
            id="through views",
        ),
        pytest.param(
            lambda m, x: (reduced(m, (copied(m, x) @ m.split) * m.norm) + x) * m.norm,
            *({"norm"}, {"norm", "first.weight"}),
            id="both",
        ),
    ],
)
def test_a_parameter_is_partial_where_it_meets_split_tensors(
    forward: Callable[[Any, Tensor], Tensor], partial: set[str], complete: set[str]
) -> None:
    flow = flow_of(forward)
    assert flow.faults == []
    assert flow.partial == partial
    assert flow.complete == complete


@pytest.mark.parametrize(
    ("forward", "fault"),
    [
        pytest.param(lambda m, x: x @ m.split, "no seam of the plan sums it", id="no seam"),
        pytest.param(lambda m, x: (copied(m, x) @ m.split) + x, "no seam of the plan sums it", id="residual"),
        pytest.param(lambda m, x: copied(m, copied(m, x)) @ m.split, "a seam around it does so already", id="twice"),
        pytest.param(lambda m, x: reduced(m, x), "which is whole already", id="sum of a whole"),
        pytest.param(lambda m, x: copied(m, copied(m, x) @ m.split), "another part of", id="copy of a part"),
        pytest.param(lambda m, x: copied(m, x) + x, "mixes a whole activation", id="copied and whole"),
    ],
)
def test_what_no_contract_makes_right_is_a_fault(forward: Callable[[Any, Tensor], Tensor], fault: str) -> None:
    faults = flow_of(forward).faults
    assert len(faults) == 1
    assert fault in faults[0]


def test_only_the_last_features_of_a_compressed_projection_are_copied() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        both = x.clone()
        m.flow.copy_tail(x, both, 1)
        head, tail = both.split([3, 1], -1)
        if m.uses_head:
            return head @ m.split[:3]
        return tail * (copied(m, head) @ m.split[:3])

    for uses_head, faults in ((False, 0), (True, 1)):
        Model.uses_head = uses_head  # type: ignore[attr-defined]
        assert len(flow_of(forward).faults) == faults

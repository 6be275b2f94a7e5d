"""A walk meets what torch's own functions give: the same modules and parameters, names and order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from core.distributed.layout.model_walk import walk_model


def two_names() -> nn.Module:
    """A parameter and a module with two names each, a parameter of the root, places that hold nothing."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2))
    model.tied = nn.Linear(2, 3)
    model.tied.weight = model[0].weight
    model.again = model[2]
    model.nothing = None
    model.register_parameter("empty", None)
    model.scale = nn.Parameter(torch.ones(1))
    return model


class Renaming(nn.Module):
    """Names its parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in super().named_parameters(*args, **kwargs):
            yield name.replace("inner.", "its."), param


@pytest.mark.parametrize(
    "model",
    [
        two_names(),
        nn.Sequential(),
        nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(3)),
        Renaming(),
        nn.Sequential(Renaming()),
        checkpoint_wrapper(two_names()),
        nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))),
        torch.jit.script(nn.Sequential(nn.Linear(2, 2))),
    ],
    ids=["two names", "empty", "list", "own names", "own names inside", "checkpointed", "inside", "scripted"],
)
def test_a_walk_meets_what_torch_names_in_its_order(model: nn.Module) -> None:
    modules, named = walk_model(model)
    assert [id(part) for part in modules] == [id(part) for part in model.modules()]
    expected = list(model.named_parameters())
    assert [(name, id(param)) for name, param in named.items()] == [(name, id(param)) for name, param in expected]

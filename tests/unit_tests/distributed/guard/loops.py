"""Training loops of users on two ranks, right ones and wrong ones, and what a loop is told while it runs.

A program is a function that yields once a step, after `finalize_model_grads` of it. All split layers are written here,
as a user would write them, because the layers of core are not what is tested.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state

WIDTH, CLASSES = 8, 5


class Report(NamedTuple):
    """The first thing that a program was told: 'error' or 'warning', in which step (from 1), and the text."""

    kind: str
    step: int
    text: str


def report_of(running: Iterator[None], steps: int = 4) -> Report | None:
    """Run a program for some steps; None if nothing was said."""
    first: Report | None = None
    for step in range(1, steps + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                next(running)
            except RuntimeError as error:
                return first or Report("error", step, str(error))
        said = [str(each.message) for each in caught if each.category is UserWarning]
        if said and first is None:
            first = Report("warning", step, " | ".join(said))
    return first


# -- split layers of a user ------------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """Forward: the same on all ranks. Backward: the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Forward: the sum over the ranks. Backward: the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class SplitLayer(nn.Module):
    """norm, a matrix split by rows, a norm of this rank's features, a matrix split by columns, a bias."""

    def __init__(self, mistakes: frozenset[str], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.mistakes, self.group = mistakes, group
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.norm = nn.LayerNorm(WIDTH)
        up, down = torch.randn(2 * WIDTH, WIDTH) / 3, torch.randn(WIDTH, 2 * WIDTH) / 4
        self.up = nn.Parameter(up.chunk(size, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(size, 1)[rank].clone())
        for dim, param in enumerate((self.up, self.down)):
            param.tensor_model_parallel, param.partition_dim = True, dim  # type: ignore[attr-defined]
        self.inner = nn.Parameter(torch.ones(2 * WIDTH // size))
        if "inner is declared whole" not in mistakes:
            self.inner.gradient_declaration = (("tp",), ())  # type: ignore[attr-defined]
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if "no sum in backward" not in self.mistakes:
            y = _Copy.apply(y, self.group)  # type: ignore[no-untyped-call]
        y = torch.tanh(y @ self.up.T) * self.inner @ self.down.T
        if "sum over another group" in self.mistakes:
            y = _Sum.apply(y, parallel_state.get_data_parallel_group())  # type: ignore[no-untyped-call]
        elif "no sum in forward" not in self.mistakes:
            y = _Sum.apply(y, self.group)  # type: ignore[no-untyped-call]
        if "another dropout" in self.mistakes:
            y = torch.nn.functional.dropout(y, 0.5)
        return x + y + self.bias


class SplitNet(nn.Module):
    """Tokens [b, s] to the mean of a loss, with two split layers."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        group = parallel_state.get_tensor_model_parallel_group()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(SplitLayer(frozenset(mistakes), group) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        torch.manual_seed(100 + dist.get_rank())  # what is drawn later differs

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Net(nn.Module):
    """A plain network [b, WIDTH] to [b, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(WIDTH, 12)
        self.norm = nn.LayerNorm(12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.last = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)


def tokens(step: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of tokens and labels [3, 4]."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(0, 11, (3, 4), generator=generator), torch.randint(0, CLASSES, (3, 4), generator=generator)


def samples(step: int, rank: int | None = None) -> torch.Tensor:
    """A batch [4, WIDTH]; by default each rank has its own."""
    number = dist.get_rank() if rank is None else rank
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * number + step + 1))

"""Models of right programs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit_tests.distributed.guard.loops import CLASSES, WIDTH, Net


class Column(Net):
    """[b, WIDTH] to [b, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 1)


class Gan(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.maker = nn.Sequential(Net(), nn.Dropout(dropout), nn.Linear(CLASSES, CLASSES))
        self.judge = nn.Sequential(nn.Linear(CLASSES, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor, part: str = "maker") -> Tensor:
        x = x if part == "judge" else self.maker(x)
        return x if part == "maker" else self.judge(x)


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(CLASSES, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = super().forward(x)
        return hidden, self.value(hidden)


class TakesItsPart(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.chunk(dist.get_world_size())[dist.get_rank()])


class SequenceOverAllRanks(Net):
    """Each rank has a part of the positions, and all are attended to."""

    def forward(self, x: Tensor) -> Tensor:
        mine = super().forward(x.chunk(dist.get_world_size())[dist.get_rank()])
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.detach())
        parts[dist.get_rank()] = mine
        return (mine @ torch.cat(parts).T).softmax(-1) @ torch.cat(parts)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.head = nn.Embedding(17, WIDTH), nn.Linear(WIDTH, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens.long()))


class Adapted(Net):
    """A base with adapters. frozen: True if the base does not train."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.requires_grad_(not frozen)
        self.a = nn.Parameter(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)))
        self.b = nn.Parameter(torch.zeros(CLASSES, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T


class Scaled(Net):
    """IA3: the base is frozen, and scales of activations train."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Codes(Net):
    """A vector quantizer, whose codes follow what they are chosen for."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        near = self.codes[torch.cdist(hidden, self.codes).argmin(1)]
        return hidden + (near - hidden).detach() + 0 * near


class Tasks(Net):
    """A trunk with heads, of which each forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(CLASSES, 2) for _ in range(4))
        self.other = nn.Linear(CLASSES, 2)

    def forward(self, x: Tensor, task: int = 0) -> Tensor:
        hidden = super().forward(x)
        return self.other(hidden) if task == 4 else self.heads[task](hidden)


class Experts(nn.Module):
    """Experts are trained first, and the router later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(3))
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, routed: bool = True) -> Tensor:
        weights = self.router(x).softmax(-1) if routed else torch.full((len(x), 3), 1 / 3)
        return sum(
            weight.unsqueeze(1) * expert(x) for weight, expert in zip(weights.unbind(1), self.experts, strict=True)
        )  # type: ignore[return-value]


class Dropped(Net):
    """Layer drop, or stochastic depth with blocks as attributes; drawn alike on all ranks, or by rank."""

    def __init__(self, by_rank: bool) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(dist.get_rank() if by_rank else 0)
        self.block_a, self.block_b, self.block_c = (nn.Linear(CLASSES, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        for block in (self.block_a, self.block_b, self.block_c):
            if torch.rand((), generator=self.draw) < 0.3:
                hidden = hidden + torch.tanh(block(hidden))
        return hidden


class Growing(nn.Module):
    """Progressive growing: a stage more every second step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.small, self.middle, self.large = nn.Linear(WIDTH, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, size: int) -> Tensor:
        x = self.small(x)
        x = torch.tanh(self.middle(x)) if size > 1 else x
        return torch.tanh(self.large(x)) if size > 2 else x


class WithPooler(Net):
    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(CLASSES, CLASSES)


class Reversed(torch.autograd.Function):
    """y = x + f(x): the input is made again from the output, with an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        with torch.no_grad():
            y = x + 0.1 * torch.tanh(layer(x))
        ctx.layer = layer
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, out: Tensor) -> Any:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        with torch.enable_grad():
            x = (y - 0.1 * torch.tanh(ctx.layer(y.detach()))).detach().requires_grad_()
            again = x + 0.1 * torch.tanh(ctx.layer(x))
            again.backward(out)
        return x.grad, None


class Reversible(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for layer in self.layers:
            x = Reversed.apply(x, layer)  # type: ignore[no-untyped-call]
        return self.last(x)


class Denoiser(Net):
    """Half of the time it is given its own first guess."""

    def forward(self, x: Tensor, guess: Tensor | None = None) -> Tensor:
        return super().forward(x if guess is None else x + F.pad(guess, (0, WIDTH - CLASSES)))

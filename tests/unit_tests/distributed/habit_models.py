"""Random modules whose training is tested: small, of odd sizes, of every kind that a gradient may come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 12
BATCH = 5
WORDS = 11


@dataclass(frozen=True)
class Data:
    """One microbatch of one rank. turn: which branch this rank takes. broken: a layer shall raise."""

    x: torch.Tensor  # [BATCH, WIDTH]
    tokens: torch.Tensor  # [BATCH]
    target: torch.Tensor  # [BATCH, 3]
    turn: int
    broken: bool = False


class Broken(ArithmeticError):
    """The user's own error."""


def data_of(rank: int, step: int, microbatch: int, dtype: torch.dtype) -> Data:
    """Different on every rank, in every step and every microbatch."""
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + microbatch + 7)
    return Data(
        x=torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype),
        tokens=torch.randint(WORDS, (BATCH,), generator=generator),
        target=2 * torch.randn(BATCH, 3, generator=generator, dtype=torch.float64).to(dtype),
        turn=rank + step,
    )


class Linears(nn.Module):
    """Two layers of an odd width; one without a bias."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, odd)
        self.down = nn.Linear(odd, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Conv(nn.Module):
    """A convolution whose weight is not contiguous: channels last."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        return torch.tanh(self.conv(x.reshape(-1, 3, 2, 2)).reshape(-1, WIDTH)) + x


class Words(nn.Module):
    """An embedding, with dense gradients or with sparse ones."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=0, sparse=odd != 5)

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        return x + 0.5 * self.table(data.tokens)


class Norms(nn.Module):
    """A layer norm and a batch norm, which has buffers of its own."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(WIDTH)
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        return self.batch(self.layer(x))


class Attention(nn.Module):
    """torch's attention, whose output layer's weights are used outside of their module."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        words = x.reshape(-1, 2, 6)
        return x + self.attention(words, words, words, need_weights=False)[0].reshape(-1, WIDTH)


class Recurrent(nn.Module):
    """An RNN over two steps."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.rnn = (nn.GRU if odd == 5 else nn.LSTM if odd == 7 else nn.RNN)(6, 6, batch_first=True)

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        return x + self.rnn(x.reshape(-1, 2, 6))[0].reshape(-1, WIDTH)


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(x))))


class Branches(nn.Module):
    """A branch that some ranks use, one that all use but in every third step, one that no one uses."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.even = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seldom = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, odd)
        self.step = 0  # set by the loop

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        x = x + torch.tanh((self.even if data.turn % 2 == 0 else self.odd)(x))
        return x if self.step % 3 == 1 else x + 0.5 * torch.tanh(self.seldom(x))


class Frozen(nn.Module):
    """A layer that is not trained between others that are."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.fixed = nn.Linear(WIDTH, WIDTH)
        self.fixed.requires_grad_(False)
        self.after = nn.Linear(WIDTH, WIDTH)
        self.after.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        return x + self.after(torch.tanh(self.fixed(x)))


class Odd(nn.Module):
    """Parameters of the module itself: of no dimension, of one element, of none, and in a list."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.full((1,), 0.25))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(n, WIDTH) / 3) for n in (1, odd)])

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        x = x * self.scale + self.shift + self.empty.sum()
        for rows in self.rows:
            x = x + torch.tanh(x @ rows.t()) @ rows
        return x


class ScaledTanh(torch.autograd.Function):
    """weight * tanh(x), with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return weight * x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight * (1 - x.tanh() ** 2), (grad * x.tanh()).sum(0)


class Custom(nn.Module):
    """A custom autograd function."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        return ScaledTanh.apply(x, self.weight)


class Outside(nn.Module):
    """Weights that are used without their module's forward, and a norm of them in the graph."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.holder = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        x = torch.tanh(F.linear(x, self.holder.weight, self.holder.bias))
        return x + 0.1 * self.holder.weight.pow(2).mean()


class Normed(nn.Module):
    """A parametrization of torch: the weight is computed from two parameters."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class OtherDtype(nn.Module):
    """A layer in double precision within a model in single precision, or the other way round."""

    def __init__(self, odd: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, data: Data) -> torch.Tensor:
        return x + torch.tanh(self.layer(x.to(self.layer.weight.dtype))).to(x.dtype)


PARTS: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (
        Linears,
        Conv,
        Words,
        Norms,
        Attention,
        Recurrent,
        Tied,
        Branches,
        Frozen,
        Odd,
        Custom,
        Outside,
        Normed,
        OtherDtype,
    )
}


class Net(nn.Module):
    """Parts one after another, and a head with two outputs: the answer [BATCH, 3] and a number next to it.

    recompute: None, or `use_reentrant` of torch's checkpoint, by which each part is run.
    """

    def __init__(self, names: Sequence[str], odd: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([PARTS[name](odd) for name in names])
        self.head = nn.Linear(WIDTH, 3)
        self.aside = nn.Linear(WIDTH, 1)
        self.recompute: bool | None = None
        self.adapter: nn.Linear | None = None

    def add_adapter(self, dtype: torch.dtype) -> nn.Linear:
        """Add a frozen layer, alike on every rank."""
        self.adapter = nn.Linear(WIDTH, WIDTH).to(dtype).requires_grad_(False)
        with torch.no_grad():
            self.adapter.weight.copy_(torch.linspace(-0.5, 0.5, WIDTH * WIDTH).reshape(WIDTH, WIDTH))
            self.adapter.bias.zero_()
        return self.adapter

    def forward(self, data: Data, hidden: torch.Tensor | None = None, start: int = 0, stop: int | None = None) -> Any:
        """With `stop`, the hidden activations before that part; they may be given back as `hidden` with `start`."""
        hidden = data.x if hidden is None else hidden
        if self.recompute is not None and not hidden.requires_grad:
            hidden = hidden.clone().requires_grad_()
        for number, part in enumerate(self.parts[start:stop]):
            if data.broken and number == len(self.parts[start:stop]) // 2:
                raise Broken("the user's own")
            if self.recompute is None:
                hidden = part(hidden, data)
            else:
                hidden = checkpoint(part, hidden, data, use_reentrant=self.recompute)
        if stop is not None:
            return hidden
        if self.adapter is not None:
            hidden = hidden + torch.tanh(self.adapter(hidden))
        hidden = torch.tanh(hidden)
        return self.head(hidden), self.aside(hidden).abs().mean()


def build(names: Sequence[str], odd: int, dtype: torch.dtype, seed: int) -> Net:
    """The same model wherever it is built from the same arguments."""
    random_state = torch.get_rng_state()
    torch.manual_seed(seed)
    net = Net(names, odd).to(dtype)
    torch.set_rng_state(random_state)
    for part in net.parts:
        if isinstance(part, OtherDtype):
            part.to(torch.float32 if dtype == torch.float64 else torch.float64)
    return net


def set_step(net: nn.Module, step: int) -> None:
    """Tell the branches which step it is."""
    for module in net.modules():
        if isinstance(module, Branches):
            module.step = step

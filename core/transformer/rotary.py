"""Rotary positions (arXiv 2104.09864): each pair of a head's channels is turned by an angle, more at each position."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Turns queries and keys; has no parameters."""

    def __init__(self, head_size: int, base: float = 10000.0) -> None:
        super().__init__()
        self.head_size = head_size
        self.base = base
        self._turns: tuple[tuple[int, torch.dtype, torch.device], Tensor, Tensor] | None = None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Each of the inputs [s, b, heads, head_size], turned by positions 0 to s - 1."""
        cos, sin = self._cos_sin(inputs[0])
        return tuple(input_ * cos + _quarter_turn(input_) * sin for input_ in inputs)

    def _cos_sin(self, like: Tensor) -> tuple[Tensor, Tensor]:
        key = (like.shape[0], like.dtype, like.device)
        if self._turns is None or self._turns[0] != key:
            # In fp64, so that every dtype gets the angles of the same positions, rounded once.
            exponent = torch.arange(0, self.head_size, 2, dtype=torch.float64, device="cpu") / self.head_size
            positions = torch.arange(like.shape[0], dtype=torch.float64, device="cpu")
            angle = torch.outer(positions, self.base**-exponent)
            angle = rearrange(torch.cat([angle, angle], dim=-1), "s d -> s 1 1 d")
            self._turns = key, angle.cos().to(like.device, like.dtype), angle.sin().to(like.device, like.dtype)
        return self._turns[1], self._turns[2]


def _quarter_turn(input_: Tensor) -> Tensor:
    """The channel pairs are (i, i + head_size / 2), as in GPT-NeoX."""
    first, second = input_.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)

"""Rotary position embeddings (arXiv 2104.09864): rotate pairs of a head's channels by position-dependent angles."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from core.context_parallel import positions_on_rank


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by position-dependent angles; has no learnable parameters.

    Args:
        head_size (int): Number of channels per head.
        base (float, optional): Base of the rotary frequencies.
        cp_size (int, optional): Context-parallel size.
        cp_rank (int, optional): Context-parallel rank, which determines this rank's positions.
    """

    def __init__(self, head_size: int, base: float = 10000.0, cp_size: int = 1, cp_rank: int = 0) -> None:
        super().__init__()
        self.head_size = head_size
        self.base = base
        self.cp_size = cp_size
        self.cp_rank = cp_rank
        self._turns: tuple[tuple[int, torch.dtype, torch.device], Tensor, Tensor] | None = None

    def forward(self, *inputs: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        """Rotate each input by its position.

        Args:
            inputs: Tensors [s, b, heads, head_size].
            positions (Tensor): [b, s]. Defaults to this rank's positions, counted from 0 through the sequence.
        """
        cos, sin = self._cos_sin(inputs[0]) if positions is None else self._turns_of(positions, inputs[0])
        return tuple(input_ * cos + _quarter_turn(input_) * sin for input_ in inputs)

    def _cos_sin(self, like: Tensor) -> tuple[Tensor, Tensor]:
        key = (like.shape[0], like.dtype, like.device)
        if self._turns is None or self._turns[0] != key:
            positions = positions_on_rank(like.shape[0], self.cp_size, self.cp_rank, device="cpu").unsqueeze(0)
            self._turns = key, *self._turns_of(positions, like)
        return self._turns[1], self._turns[2]

    def _turns_of(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [s, b, 1, head_size] of positions [b, s]."""
        # In fp64, so that every dtype gets the angles of the same positions, rounded once.
        exponent = torch.arange(0, self.head_size, 2, dtype=torch.float64, device=positions.device) / self.head_size
        angle = rearrange(positions, "b s -> s b 1 1") * self.base**-exponent
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos().to(like.device, like.dtype), angle.sin().to(like.device, like.dtype)


def _quarter_turn(input_: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + head_size / 2) by 90 degrees, as in GPT-NeoX."""
    first, second = input_.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)

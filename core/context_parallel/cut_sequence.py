"""CutSequence: splits a sequence inside a forward that gets all positions, and gathers it again.

Note [Gradients of a part of the sequence]: The engine treats context-parallel ranks as data ranks and averages their
gradients. A parameter between the split and the gather sees a part of the tokens, so its gradients should be summed
instead. Hence the gradient that enters at the gather is multiplied by the number of ranks, and the gradient that leaves
at the split is divided by it. Everything outside computes the full sequence, equally on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.context_parallel.sequence_split import rank_order
from core.tensor_parallel.mappings import all_reduce, gather_first, group_rank, group_size

Map = Callable[[Tensor], Tensor]


class CutSequence:
    """Split of a sequence over a group.

    ``in_halves`` gives each rank one chunk from the head and one from the tail.
    """

    def __init__(self, group: dist.ProcessGroup, *, in_halves: bool) -> None:
        self.group, self.in_halves = group, in_halves
        self.size, self.rank = group_size(group), group_rank(group)

    def _order(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the full sequence, grouped by rank."""
        positions = torch.arange(length, device=device)
        return rank_order(positions, 0, self.size) if self.in_halves else positions

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor along its sequence dimension ``dim``."""
        return whole.index_select(dim, self._order(whole.shape[dim], whole.device).chunk(self.size)[self.rank])

    def join(self, part: Tensor, dim: int) -> Tensor:
        """All-gather the ranks' parts to the full sequence along ``dim``, without gradients. Collective over the
        group.
        """
        joined = gather_first(part.transpose(0, dim).contiguous(), self.group)
        return joined.index_select(0, self._order(len(joined), part.device).argsort()).transpose(0, dim).contiguous()

    def cut(self, whole: Tensor) -> Tensor:
        """Apply ``part`` to [..., s, h] and average the gathered gradient: Note [Gradients of a part of the
        sequence].
        """
        part: Tensor = _LinearMap.apply(whole, partial(self.part, dim=-2), lambda grad: self.join(grad, -2) / self.size)
        return part

    def whole(self, part: Tensor) -> Tensor:
        """Apply ``join`` to [..., s, h], and scale this rank's gradient: Note [Gradients of a part of the sequence]."""
        joined: Tensor = _LinearMap.apply(
            part, partial(self.join, dim=-2), lambda grad: self.part(grad, -2) * self.size
        )
        return joined

    def total(self, value: Tensor) -> Tensor:
        """Sum over the ranks, and multiply the gradient by their number: Note [Gradients of a part of the sequence]."""
        summed: Tensor = _LinearMap.apply(value, partial(all_reduce, group=self.group), lambda grad: grad * self.size)
        return summed


class _LinearMap(torch.autograd.Function):
    """Autograd function for a linear function and a separate function for its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, function: Map, gradient: Map) -> Tensor:
        ctx.gradient = gradient
        return function(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad), None, None

"""CutSequence: a sequence that is cut, and made whole again, inside a forward that is given the whole one.

Note [Gradients of a part of the sequence]: context-parallel ranks are data ranks to the engine, which takes the mean of
their gradients. A parameter between the cut and the join has seen a part of the tokens, so its gradient should be
summed. Hence the gradient that enters from behind is multiplied by the number of ranks, and divided by it where it
leaves in front: what lies outside computes the whole sequence, on every rank alike.
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
    """Division of a sequence over a group. in_halves: True if a rank has a chunk of the head and one of the tail."""

    def __init__(self, group: dist.ProcessGroup, *, in_halves: bool) -> None:
        self.group, self.in_halves = group, in_halves
        self.size, self.rank = group_size(group), group_rank(group)

    def _order(self, length: int, device: torch.device) -> Tensor:
        """Positions of the whole sequence, those of each rank one after the other."""
        positions = torch.arange(length, device=device)
        return rank_order(positions, 0, self.size) if self.in_halves else positions

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a dimension that is as long as the sequence."""
        return whole.index_select(dim, self._order(whole.shape[dim], whole.device).chunk(self.size)[self.rank])

    def join(self, part: Tensor, dim: int) -> Tensor:
        """The whole sequence of all ranks' parts, without gradients. Collective over the group."""
        joined = gather_first(part.transpose(0, dim).contiguous(), self.group)
        return joined.index_select(0, self._order(len(joined), part.device).argsort()).transpose(0, dim).contiguous()

    def cut(self, whole: Tensor) -> Tensor:
        """`part` of [..., s, h], with the mean of a gradient that is of all tokens: Note [Gradients of a part]."""
        part: Tensor = _LinearMap.apply(whole, partial(self.part, dim=-2), lambda grad: self.join(grad, -2) / self.size)
        return part

    def whole(self, part: Tensor) -> Tensor:
        """`join` of [..., s, h], with a gradient for what all ranks compute alike: Note [Gradients of a part]."""
        joined: Tensor = _LinearMap.apply(
            part, partial(self.join, dim=-2), lambda grad: self.part(grad, -2) * self.size
        )
        return joined

    def total(self, value: Tensor) -> Tensor:
        """The sum over the ranks. Its gradient is multiplied by their number: Note [Gradients of a part]."""
        summed: Tensor = _LinearMap.apply(value, partial(all_reduce, group=self.group), lambda grad: grad * self.size)
        return summed


class _LinearMap(torch.autograd.Function):
    """Apply a linear function to a tensor; another function gives the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, function: Map, gradient: Map) -> Tensor:
        ctx.gradient = gradient
        return function(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad), None, None

"""Views of a flat tensor, one for each parameter that lies in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from core.distributed.layout.param_layout import Slot


def views_of(flat: torch.Tensor, slots: Sequence[Slot], start: int) -> list[torch.Tensor]:
    """For each slot its elements of `flat` in the parameter's shape; `flat` begins at element `start` of the buffer."""
    return [flat[slot.start - start : slot.end - start].view(slot.shape) for slot in slots]


@torch.no_grad()
def move_to(views: Sequence[torch.Tensor], params: Sequence[nn.Parameter]) -> None:
    """Move each parameter, with its values, to the memory of a view. The memory that it had before is freed."""
    for param, view in zip(params, views, strict=True):
        view.copy_(param)
        param.data = view

"""Views of a flat tensor, one for each parameter that lies in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from core.distributed.layout.param_layout import Slot
from core.groups.agree import SyncError

REMEDY = "Do it before wrapping, or delete the wrapper and wrap the model again"


def views_of(flat: torch.Tensor, slots: Sequence[Slot], start: int) -> list[torch.Tensor]:
    """For each slot its elements of `flat` in the parameter's shape; `flat` begins at element `start` of the buffer."""
    return [flat[slot.start - start : slot.end - start].view(slot.shape) for slot in slots]


@torch.no_grad()
def move_to(views: Sequence[torch.Tensor], params: Sequence[nn.Parameter]) -> None:
    """Move each parameter, with its values, to the memory of a view. The memory that it had before is freed."""
    for param, view in zip(params, views, strict=True):
        view.copy_(param)
        param.data = view


def refuse_reshaped(names: Sequence[str], params: Sequence[nn.Parameter], shapes: Sequence[torch.Size]) -> None:
    """SyncError for the first parameter whose shape is not that of the wrap any more. Local."""
    for name, param, was in zip(names, params, shapes, strict=True):
        if param.shape != was:
            raise SyncError(
                f"parameter {name!r} is {list(param.shape)} now and was {list(was)} when the model was wrapped; was it "
                f"resized (resize_token_embeddings)? {REMEDY}"
            )

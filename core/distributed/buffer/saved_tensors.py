"""Hooks on tensors that autograd saves for backward: find the active hooks, and save a tensor unchanged.

torch calls only the innermost hooks, and does not check the version of a tensor that passed through any hook. Hooks
that do not handle a tensor pass it to the outer hooks, or save it with ``save_unchanged``, which keeps the check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


def active_hooks() -> tuple[Pack, Unpack] | None:
    """Return the innermost saved-tensor hooks of this thread, or None."""
    found: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def save_unchanged(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Save a tensor as autograd does without hooks."""
    # An output saved by its own node would form a reference cycle with the node and never be freed.
    return (tensor if tensor.grad_fn is None else tensor.detach()), tensor._version


def load_unchanged(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a tensor that ``save_unchanged`` has saved.

    Raises:
        RuntimeError: If the tensor was written in place since, as autograd says it without hooks.
    """
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"tensor of shape {list(tensor.shape)} and {tensor.dtype} is at version {tensor._version}; expected "
            f"version {version} instead"
        )
    return tensor

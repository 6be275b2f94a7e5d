"""Reusable scratch tensors, because allocating large ones costs more than writing to them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class GlobalMemoryBuffer:
    """Scratch memory by name, with one flat tensor per (name, dtype, device), which grows on demand."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def get_tensor(
        self, tensor_shape: Sequence[int], dtype: torch.dtype, name: str, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return an uninitialized tensor in the memory ``name``. The next user of that name overwrites it."""
        place = torch.device(device) if device is not None else torch.get_default_device()
        key, numel = (name, dtype, place), math.prod(tensor_shape)
        flat = self._memory.get(key)
        if flat is None or flat.numel() < numel:
            flat = self._memory[key] = torch.empty(numel, dtype=dtype, device=place, requires_grad=False)
        return flat[:numel].view(*tensor_shape)

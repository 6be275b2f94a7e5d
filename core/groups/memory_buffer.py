"""Scratch tensors that are kept between uses, because fresh large ones cost more than what is written into them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class GlobalMemoryBuffer:
    """Named scratch memory: one flat tensor a (name, dtype, device), grown when a larger one is asked for."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def get_tensor(
        self, tensor_shape: Sequence[int], dtype: torch.dtype, name: str, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """An uninitialised tensor in the memory `name`; it is overwritten by the next user of that name.

        device: torch's default device if None.
        """
        place = torch.device(device) if device is not None else torch.get_default_device()
        key, numel = (name, dtype, place), math.prod(tensor_shape)
        flat = self._memory.get(key)
        if flat is None or flat.numel() < numel:
            flat = self._memory[key] = torch.empty(numel, dtype=dtype, device=place, requires_grad=False)
        return flat[:numel].view(*tensor_shape)

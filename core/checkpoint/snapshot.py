"""Copies of tensors in CPU memory that is reused from one save to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.checkpoint.boxes import row_strides

ALIGNMENT = 64  # bytes; every dtype may begin there, and a cache line does


class SnapshotMemory:
    """Block of CPU memory, page-locked if tensors come from an accelerator. It grows to the largest snapshot.

    Fresh pages cost several times the copy itself, so the block is never freed. There is one snapshot at a time: the
    next ``take`` overwrites it.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def bytes(self) -> int:
        return self._block.numel()

    @staticmethod
    def bytes_for(tensors: Sequence[torch.Tensor]) -> int:
        return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy ``tensors``. The originals may change once this has returned."""
        needed = self.bytes_for(tensors)
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        if self.bytes < needed or (devices and not self._block.is_pinned()):
            self._block = torch.empty(
                0, dtype=torch.uint8, device="cpu"
            )  # free the old block before the new one exists
            self._block = torch.empty(needed, dtype=torch.uint8, device="cpu", pin_memory=bool(devices))
        storage, offset, copies = self._block.untyped_storage(), 0, []
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if size:
                copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
                copy.set_(storage[offset : offset + size], 0, tensor.shape, row_strides(tensor.shape))
            else:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            copy.copy_(tensor.detach(), non_blocking=not tensor.is_cpu)
            copies.append(copy)
            offset += _aligned(size)
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        return copies


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements on the CPU in a storage without other elements, because torch.save writes complete
    storages.
    """
    tensor = tensor.detach().cpu()
    size = tensor.numel() * tensor.element_size()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return tensor.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    if tensor.untyped_storage().nbytes() == size:
        return tensor
    if size == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    start = tensor.storage_offset() * tensor.element_size()
    part = tensor.untyped_storage()[start : start + size]  # shares the memory
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(part, 0, tensor.shape, tensor.stride())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

"""MemoryTier: memory for offloaded shards. HostTier serves GPUs, and files (file_tier.py) serve CPUs."""

from __future__ import annotations

import weakref

import torch

from core.distributed.wire import huge_pages


class MemoryTier:
    """Memory of one wrapped model's offloaded shards on this rank. ``place`` names it for messages."""

    place: str
    failure: str | None = None  # why the tier could not store new data; no further step is possible then

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros on the CPU, [numel]."""
        raise NotImplementedError

    def masters(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros on the CPU, [numel], for master weights and moments."""
        raise NotImplementedError

    def wait_for_copies(self) -> None:
        """Wait until no copy reads the memory, before it is written."""


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> torch.Event:
    """Begin a copy from a device tensor to a CPU tensor of the same shape, and return an event.

    The CPU tensor has the values after the host has synchronized with the event.
    """
    target.copy_(source, non_blocking=True)
    return torch.accelerator.current_stream(source.device).record_event()


class HostTier(MemoryTier):
    """Host memory for a GPU, which copies to and from it asynchronously.

    Parameter shards are stored there and copied to the device on a separate stream. Master weights and moments are also
    stored and updated there. Their gradients are copied there after the reduction, or when the optimizer uses them.
    Pinned memory lets the device copy while the host continues.
    """

    place = "the host's memory"

    def __init__(self, device: torch.device, *, pin_memory: bool, pin_masters: bool = False) -> None:
        self.pin_memory, self.pin_masters = pin_memory, pin_masters
        self.stream = torch.Stream(device)
        # A deleted model may have a bucket in flight, whose memory would be given to another tensor.
        weakref.finalize(self, self.stream.synchronize).atexit = False

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros on the CPU, [numel]. Raises RuntimeError if the host has no more memory that can be pinned."""
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=self.pin_memory)

    def masters(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self.pin_masters:
            return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=True)
        return huge_pages.zeros(numel, dtype, torch.device("cpu"))

    def wait_for_copies(self) -> None:
        self.stream.synchronize()

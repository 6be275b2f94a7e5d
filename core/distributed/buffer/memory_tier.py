"""MemoryTier: memory of shards that are not on the device: HostTier with a GPU, and files (file_tier.py) on a CPU."""

from __future__ import annotations

import weakref

import torch

from core.distributed.wire import huge_pages


class MemoryTier:
    """Memory of one wrapped model's offloaded shards on this rank. place: in words."""

    place: str
    failure: str | None = None  # why the tier could not take what it was given, so that no further step can be made

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of zeros on the CPU."""
        raise NotImplementedError

    def masters(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of zeros on the CPU, for master weights and moments."""
        raise NotImplementedError

    def wait_for_copies(self) -> None:
        """Wait until no copy reads the memory any more, since it is going to be written."""


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> torch.Event:
    """Begin to copy from a device; the host finds the values once it has synchronized with the event."""
    target.copy_(source, non_blocking=True)
    return torch.accelerator.current_stream(source.device).record_event()


class HostTier(MemoryTier):
    """The host's memory, with a device that copies on its own: a GPU.

    Shards of parameters lie there, and are copied to the device on a stream of their own. Masters and moments lie there
    too, and are stepped there. Gradients of these are copied there when they are reduced, or when they are stepped.

    pin_memory: True for memory that the device copies from while the host continues. pin_masters: True if masters
    lie in such memory too.
    """

    place = "the host's memory"

    def __init__(self, device: torch.device, *, pin_memory: bool, pin_masters: bool = False) -> None:
        self.pin_memory, self.pin_masters = pin_memory, pin_masters
        self.stream = torch.Stream(device)
        # A model that is deleted may have a bucket on its way, whose memory is then given to another tensor.
        weakref.finalize(self, self.stream.synchronize).atexit = False

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of zeros on the CPU. RuntimeError where the host has no memory left that can be pinned."""
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=self.pin_memory)

    def masters(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self.pin_masters:
            return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=True)
        return huge_pages.zeros(numel, dtype, torch.device("cpu"))

    def wait_for_copies(self) -> None:
        self.stream.synchronize()

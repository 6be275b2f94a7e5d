"""CPU buffers in huge pages: one entry of the processor's address cache covers 2 MiB of memory instead of 4 KiB.

A step streams through several tensors of the model's size at once, and misses of that cache take time. Linux uses huge
pages for memory that requests them before it is first written (/sys/kernel/mm/transparent_hugepage/enabled is madvise
or always). On other systems, or if no huge pages are free, the tensor has normal pages.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

HUGE_PAGE = 2**21  # on x86-64 and most arm64 systems; a kernel with larger pages uses them for longer tensors only
LEAST_BYTES = 2 * HUGE_PAGE  # a tensor of this size contains a full huge page at any start address


def zeros(
    shape: int | Sequence[int], dtype: torch.dtype, device: torch.device, least_bytes: int = LEAST_BYTES
) -> torch.Tensor:
    """Return ``torch.zeros``, in huge pages if the system has them and the device is the CPU.

    From ``least_bytes`` on, memory is allocated when it is first written, and returned to the system when it is freed.
    """
    numel = shape if isinstance(shape, int) else math.prod(shape)
    if device.type != "cpu" or numel * dtype.itemsize < least_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(_mapped(numel * dtype.itemsize), dtype=dtype, count=numel).view(shape)


def _mapped(nbytes: int) -> mmap.mmap:
    """Map anonymous zeros, in huge pages if large. A forked process writes to its own copy."""
    block = mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY)
    if nbytes >= LEAST_BYTES:
        with suppress(OSError, AttributeError):
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


class Blocks:
    """CPU memory for tensors that is returned to the system, or reused for the next tensor, when a tensor is freed.

    The C library may keep memory that it frees. After some tensors of a few MiB it takes larger ones from its heap too,
    where small live objects prevent their return to the system. Of ``most`` blocks, in use or free, the largest free
    ones are kept, because fresh pages cost time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.free: list[mmap.mmap] = []
        self.lent: set[int] = set()  # ids of blocks in use

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory, [numel]."""
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        block = min((free for free in self.free if len(free) >= nbytes), key=len, default=None)
        if block is None:
            block = _mapped(nbytes)
        else:
            self.free.remove(block)
        self.lent.add(id(block))
        view = memoryview(block)  # lives as long as the tensor's storage
        weakref.finalize(view, self._take_back, block).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=numel)

    def _take_back(self, block: mmap.mmap) -> None:
        self.lent.discard(id(block))
        self.free.append(block)
        while self.free and len(self.free) + len(self.lent) > self.most:
            self.free.remove(min(self.free, key=len))


def give_back() -> None:
    """Return freed memory that the C library has kept to the system, if it is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))

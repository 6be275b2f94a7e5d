"""Buffers in huge pages on the CPU: one entry of the processor's address cache for 2 MiB of memory instead of 4 KiB.

A step streams through several tensors of the model's size at once, and misses of that cache cost it time. Linux gives
huge pages to memory that asks for them before it is first written (/sys/kernel/mm/transparent_hugepage/enabled is
madvise or always). Elsewhere, or where none are left, the tensor is an ordinary one.
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

HUGE_PAGE = 2**21  # of x86-64 and of most arm64 systems; a kernel with larger ones gives them to longer tensors only
LEAST_BYTES = 2 * HUGE_PAGE  # a tensor as long as that holds a whole huge page wherever it begins


def zeros(
    shape: int | Sequence[int], dtype: torch.dtype, device: torch.device, least_bytes: int = LEAST_BYTES
) -> torch.Tensor:
    """`torch.zeros`, in huge pages where the system has them.

    From `least_bytes` on memory is taken when it is first written, and goes back to the system when it is freed.
    """
    numel = shape if isinstance(shape, int) else math.prod(shape)
    if device.type != "cpu" or numel * dtype.itemsize < least_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(_mapped(numel * dtype.itemsize), dtype=dtype, count=numel).view(shape)


def _mapped(nbytes: int) -> mmap.mmap:
    """Zeros that no file has, in huge pages if they are long. A forked process writes to its own."""
    block = mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY)
    if nbytes >= LEAST_BYTES:
        with suppress(OSError, AttributeError):
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


class Blocks:
    """Memory of tensors on the CPU, which goes back to the system when they are freed, or to the next of them.

    What the C library frees it may keep: after some tensors of a few MiB it takes longer ones from its heap as well,
    where smaller ones that live on keep them from being given back. most: blocks up to which the longest that are free
    are kept in addition to those in use, since fresh pages cost time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.free: list[mmap.mmap] = []
        self.lent: set[int] = set()  # ids of the blocks in use

    def borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel], undefined."""
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
    """Give the system what the C library has kept of freed memory, where it is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))

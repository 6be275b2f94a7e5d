"""Buffers in huge pages on the CPU: one entry of the processor's address cache for 2 MiB of memory instead of 4 KiB.

A step streams through several tensors of the model's size at once, and misses of that cache cost it time. Linux gives
huge pages to memory that asks for them before it is first written (/sys/kernel/mm/transparent_hugepage/enabled is
madvise or always). Elsewhere, or where none are left, the tensor is an ordinary one.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch

HUGE_PAGE = 2**21  # of x86-64 and of most arm64 systems; a kernel with larger ones gives them to longer tensors only
LEAST_BYTES = 2 * HUGE_PAGE  # a tensor as long as that holds a whole huge page wherever it begins


def zeros(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.zeros`, in huge pages where the system has them. It takes no more memory."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and made.nbytes >= LEAST_BYTES:
        _advise(made, 14)  # MADV_HUGEPAGE
    return made.zero_()


def read_ahead(tensor: torch.Tensor) -> None:
    """Have the system read the pages of a mapped file that a tensor lies in, while this process goes on."""
    _advise(tensor, 3)  # MADV_WILLNEED


def _advise(tensor: torch.Tensor, advice: int) -> None:
    """Tell Linux about the whole pages of a tensor on the CPU. A refusal changes nothing, so no answer is looked at."""
    if sys.platform == "linux":
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = max(0, tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(advice))


def borrowed(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """[numel] on the CPU, undefined, whose memory goes back to the system as soon as it is freed.

    What the C library frees it may keep: after some tensors of a few MiB it takes longer ones from its heap as well.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype)


def give_back() -> None:
    """Give the system what the C library has kept of freed memory, where it is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))

"""Huge pages for long tensors on the CPU: 2 MiB of memory an entry of the processor's address cache instead of 4 KiB.

An optimizer's step streams through four tensors of the model's size at once, and misses of that cache cost it about a
seventh of its time. Linux gives huge pages to memory that asks for them before it is first written
(/sys/kernel/mm/transparent_hugepage/enabled: madvise or always); where it does not, or has none left, everything is as
before. A tensor asks for whole huge pages within its own memory only, so none takes more, and nothing that is done with
tensors sees a difference.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

HUGE_PAGE = 2**21  # of x86-64 and of most arm64 systems; a kernel with larger ones gives them to longer tensors only
LEAST_BYTES = 2 * HUGE_PAGE  # a tensor as long as that holds a whole huge page wherever it begins


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """madvise(2), None where there is none."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call: Callable[[int, int, int], int] = function
    return call


def ask_for_huge_pages(tensor: torch.Tensor) -> bool:
    """Have memory that is not written yet come in huge pages. Returns: did the system take the request?"""
    madvise = _madvise()
    if madvise is None or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    if tensor.device.type != "cpu" or tensor.nbytes < LEAST_BYTES or not tensor.is_contiguous():
        return False
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # inside torch.vmap a tensor has no memory of its own
        return False
    page = mmap.PAGESIZE
    begin = -(-address // page) * page
    end = (address + tensor.nbytes) // page * page
    return madvise(begin, end - begin, mmap.MADV_HUGEPAGE) == 0


def zeros(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.zeros`, in huge pages where the system has them."""
    made = torch.empty(shape, dtype=dtype, device=device)
    ask_for_huge_pages(made)
    return made.zero_()


class HugeZeros(TorchFunctionMode):
    """While it is entered `torch.zeros_like`, by which optimizers make their state, makes it in huge pages."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A compiler that traces an update must find torch's own call; a leaf that requires grad may not be zeroed.
        if func is not torch.zeros_like or torch.compiler.is_compiling() or kwargs.get("requires_grad"):
            return func(*args, **kwargs)
        made = torch.empty_like(*args, **kwargs)
        ask_for_huge_pages(made)
        return made.zero_()

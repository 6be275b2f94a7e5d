"""Parameters that somebody has written since the last step, where their masters are copies: the master follows.

A load, a pruning mask, a clamp through `.data` leave no trace but the values. So each step compares every parameter
with its master rounded, bit for bit, in pieces that stay in a core's cache.
"""

from __future__ import annotations

import torch

CPU_NUMEL = 2**18  # elements compared at a time: 1 MiB of an fp32 master
DEVICE_NUMEL = 2**24
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def take_edits(master: torch.Tensor, param: torch.Tensor) -> bool:
    """Give the master the parameter's value in every element in which the parameter is not the master rounded.

    Both have one shape. Returns True where there was such an element. Waits for a GPU.
    """
    numel = CPU_NUMEL if master.is_cpu else DEVICE_NUMEL
    if master.dim() == 1 and master.numel() > numel:
        pieces = zip(master.split(numel), param.split(numel), strict=True)
        return any([take_edits(*piece) for piece in pieces])  # a list, as every piece has to be looked at
    rounded = master.to(param.dtype)  # the master itself where nothing is rounded
    if torch.equal(*_bits(rounded, param)):
        return False
    kind = INTEGERS[param.element_size()]
    master.copy_(torch.where(rounded.view(kind) == param.view(kind), master, param))
    return True


def _bits(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as integers, 64 bits at a time where they can be: torch compares those fastest."""
    wide = 8 // one.element_size()
    if all(t.dim() == 1 and t.is_contiguous() and not (t.numel() | t.storage_offset()) % wide for t in (one, other)):
        return one.view(torch.int64), other.view(torch.int64)
    kind = INTEGERS[one.element_size()]
    return one.view(kind), other.view(kind)

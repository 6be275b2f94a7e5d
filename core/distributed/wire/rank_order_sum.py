"""Sums over ranks, added in rank order, so that the bits do not depend on how the parts were received."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Elements added at a time: few enough to be still in the processor's cache when they are scaled, and enough that the
# time of the calls is negligible.
CHUNK = 2**17


def split_evenly(numel: int, size: int) -> list[int]:
    """Return the number of elements in each rank's part: equal, or one more for the first ranks."""
    base, extra = divmod(numel, size)
    return [base + (rank < extra) for rank in range(size)]


@torch.no_grad()
def add_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float, mean: bool) -> None:
    """Store the scaled sum or mean of equal flat parts [n] in ``out`` [n], first part first.

    16-bit parts are added in fp32. ``out`` may be one of the parts.
    """
    factor_later = scale != 1.0 or mean
    wide = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else out.dtype
    in_place = len(parts) == 2 and wide is out.dtype  # else a part of `out` is overwritten before it is added
    in_cache = out.device.type == "cpu" and (factor_later or not in_place)
    step = CHUNK if in_cache else max(1, out.numel())
    total = torch.empty(0 if in_place else min(step, out.numel()), dtype=wide, device=out.device)
    count = len(parts)
    by_product = count & (count - 1) == 0  # for a power of two the product has the quotient's bits, and is faster
    for here, *pieces in zip(out.split(step), *(part.split(step) for part in parts), strict=True):
        summed = here if in_place else total[: here.numel()]
        first = pieces[0] if pieces[0].dtype is wide else pieces[0].to(wide)
        torch.add(first, pieces[1], out=summed)
        for piece in pieces[2:]:
            summed.add_(piece)
        if mean and by_product:
            summed.mul_(1 / count)
        elif mean:
            summed.div_(count)
        if scale != 1.0:
            summed.mul_(scale)
        if not in_place:
            here.copy_(summed)

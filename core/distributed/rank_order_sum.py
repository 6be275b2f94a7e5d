"""The sum of every rank's part, added in rank order: the same bits wherever the parts have come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK = 2**16  # elements added at a time, so that they are still in the processor's cache when they are scaled


def split_evenly(numel: int, size: int) -> list[int]:
    """Elements of each rank's part: equal ones where that is possible, else the first ones one longer."""
    base, extra = divmod(numel, size)
    return [base + (rank < extra) for rank in range(size)]


@torch.no_grad()
def add_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float, mean: bool) -> None:
    """out = the sum of equal flat parts, first part first, times `scale`; 16-bit parts are added in fp32.

    `out` may be one of them.
    """
    factor_later = scale != 1.0 or mean
    wide = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else out.dtype
    in_place = len(parts) == 2 and wide is out.dtype  # else a part of `out` is overwritten before it is added
    in_cache = out.device.type == "cpu" and (factor_later or not in_place)
    step = CHUNK if in_cache else max(1, out.numel())
    total = torch.empty(0 if in_place else min(step, out.numel()), dtype=wide, device=out.device)
    for start in range(0, out.numel(), step):
        end = min(start + step, out.numel())
        here = out[start:end] if in_place else total[: end - start]
        torch.add(parts[0][start:end].to(wide), parts[1][start:end], out=here)
        for part in parts[2:]:
            here.add_(part[start:end])
        if mean:
            here.div_(len(parts))
        if scale != 1.0:
            here.mul_(scale)
        if not in_place:
            out[start:end].copy_(here)

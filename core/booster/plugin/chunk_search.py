"""Search for the chunk size that leaves the fewest unused elements in full chunks. Pure arithmetic.

A chunk is a bucket, so it ends with its last parameter and wastes no memory. But two chunks are gathered at a time, and
chunks of equal length make the best use of that memory and of each transfer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from core.distributed.layout.param_layout import PARAM_START_ALIGNMENT, pad_to_multiple

FAR_ABOVE = 3  # standard deviations: longer parameters have separate chunks, and do not affect the size of others


def search_chunk_size(numels: Sequence[int], *, least: int, search_range: int, interval: int) -> int:
    """Return the number of elements per chunk.

    If all parameters (lengths ``numels`` in registration order) together have at most ``least`` elements, they are one
    chunk. Otherwise the candidates are multiples of ``interval``, from the first one that is at least ``least`` and at
    least the longest parameter, over a distance of ``search_range`` elements. The candidate whose chunks have the
    fewest unused elements in total is chosen, or the smallest of several.
    """
    total = sum(pad_to_multiple(numel, PARAM_START_ALIGNMENT) for numel in numels)
    if total <= least or not total:
        return max(1, total)
    usual = _without_outliers(numels)
    first = max(interval, pad_to_multiple(max(least, *usual), interval))
    sizes = np.arange(first, first + search_range + 1, interval, dtype=np.int64)
    filled = np.zeros_like(sizes)
    chunks = np.ones_like(sizes)
    for numel in reversed(usual):  # as the layout fills buckets
        starts = -(-filled // PARAM_START_ALIGNMENT) * PARAM_START_ALIGNMENT
        closes = (filled > 0) & (starts + numel > sizes)
        chunks += closes
        filled = np.where(closes, numel, starts + numel)
    return int(sizes[np.argmin(chunks * sizes)])  # the number of used elements is the same for all


def _without_outliers(numels: Sequence[int]) -> list[int]:
    limit = statistics.fmean(numels) + FAR_ABOVE * statistics.pstdev(numels)
    return [numel for numel in numels if numel <= limit]

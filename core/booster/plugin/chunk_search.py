"""Chunk size: the one that leaves the least of full chunks unused. Pure arithmetic.

A chunk is a bucket, so it ends where its last parameter does, and nothing is unused in memory. But two chunks are whole
at a time, and chunks of equal length make the most of that memory, and of each transfer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from core.distributed.layout.param_layout import PARAM_START_ALIGNMENT, pad_to_multiple

FAR_ABOVE = 3  # standard deviations: longer parameters have chunks of their own, and do not decide on the others'


def search_chunk_size(numels: Sequence[int], *, least: int, search_range: int, interval: int) -> int:
    """Elements of a chunk, for parameters of these lengths in registration order.

    All in one chunk if together they are at most `least`. Otherwise the candidates are multiples of `interval`, from
    the first that is neither below `least` nor below the longest parameter, and `search_range` further. The one whose
    chunks have the fewest unused elements together is taken, and of several the smallest.
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
    return int(sizes[np.argmin(chunks * sizes)])  # the elements that are used are the same for all


def _without_outliers(numels: Sequence[int]) -> list[int]:
    limit = statistics.fmean(numels) + FAR_ABOVE * statistics.pstdev(numels)
    return [numel for numel in numels if numel <= limit]

"""Do all ranks step with the same learning rate, decay and limits? Asked in every step, at no cost.

They hold parts, or copies, of the same parameters. A scheduler that looks at a metric of its own rank, or a loss scale
that went another way on one, would train them apart, and no gradient would show it.

The question rides on the sum that the norm needs anyway. Each rank adds one integer: a digest of its settings, times a
weight. The weights of all ranks add up to 0, so the integers of ranks that agree do too; all ranks read the same sum
and decide alike. Sums are exact: up to 2**18 ranks they stay below 2**53.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch

DIGEST_BITS = 20
WEIGHT_BITS = 14
DIGITS = 6  # of a float: hosts of different kinds may compute a cosine with another last bit

Settings = tuple[tuple[str, str], ...]  # (what, its value), in words


def settings_of(groups: Iterable[Mapping[str, Any]], others: Mapping[str, Any]) -> Settings:
    """What the next step is made with: the numbers of torch param groups, and `others`, in one order on all ranks.

    Tensors are read where that does not wait for a device.
    """
    found = [(name, text) for name in sorted(others) if (text := _text(others[name])) is not None]
    for index, group in enumerate(groups):
        where = f" of param group {index} ({group['name']})" if "name" in group else f" of param group {index}"
        found += [
            (key + where, text) for key in sorted(group) if key != "params" and (text := _text(group[key])) is not None
        ]
    return tuple(found)


def _text(value: Any) -> str | None:
    """A number in words, equal where it is meant to be equal; None where it is none. Common kinds first: every step
    asks.
    """
    kind = type(value)
    if kind is float:
        return f"{value:.{DIGITS}g}"
    if kind is bool or kind is int or value is None:
        return str(value)
    if kind is str:
        return None
    if kind is tuple or kind is list:
        parts = [_text(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(value, torch.Tensor):
        return _text(value.item()) if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, Integral):
        return str(int(value))
    return _text(float(value)) if isinstance(value, Real) else None


def digest(settings: Settings) -> int:
    """DIGEST_BITS bits of it."""
    return zlib.crc32(repr(settings).encode()) >> (32 - DIGEST_BITS)


def balanced_weight(ranks: Sequence[int], rank: int) -> int:
    """The weight of `rank` among `ranks`. They add up to 0, and none is 0 unless there is only one."""
    if rank != ranks[-1]:
        return _weight(rank)
    return -sum(map(_weight, ranks[:-1]))


def _weight(rank: int) -> int:
    return 1 + (zlib.crc32(str(rank).encode()) >> (32 - WEIGHT_BITS))


def first_difference(settings: Mapping[int, Settings]) -> str | None:
    """Where two ranks differ, in words; None where they agree. Pure. settings: of each global rank."""
    first = min(settings)
    there = dict(settings[first])
    for rank in sorted(settings):
        here = dict(settings[rank])
        for what in [*here, *(name for name in there if name not in here)]:
            if here.get(what) != there.get(what):
                return (
                    f"{what} is {here.get(what, 'missing')} on rank {rank} and {there.get(what, 'missing')} on rank "
                    f"{first}"
                )
    return None

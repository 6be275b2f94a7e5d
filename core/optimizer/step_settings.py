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
from typing import Any, NamedTuple

import torch

DIGEST_BITS = 20
WEIGHT_BITS = 14
DIGITS = 6  # of a float: hosts of different kinds may compute a cosine with another last bit

# How a step is computed, which hosts may choose differently, and what optimizers of other kernels do not list.
KERNELS = frozenset(("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"))
MAY_BE_WHOLE = frozenset(("lr", "weight_decay", "momentum"))  # other whole numbers may be counts, see settings_of


class Setting(NamedTuple):
    """One number, in words. `group` is what a user calls the param group: for messages, and never compared."""

    what: str
    value: str
    group: str = ""


Settings = tuple[Setting, ...]


def settings_of(groups: Iterable[Mapping[str, Any]], others: Mapping[str, Any]) -> Settings:
    """What the next step is made with: the numbers of torch param groups, and `others`, in one order on all ranks.

    Whole numbers of groups are left out: an algorithm that counts its steps there does so only on ranks that have
    something to step. Off (None, False) is the same as not listed. Tensors are read where that does not wait for a
    device.
    """
    found = [Setting(name, text) for name in sorted(others) if (text := _text(others[name])) is not None]
    for index, group in enumerate(groups):
        where, name = f" of param group {index}", f" ({group['name']})" if "name" in group else ""
        found += [
            Setting(key + where, text, name)
            for key in sorted(group)
            if _is_compared(key, group[key]) and (text := _text(group[key])) is not None
        ]
    return tuple(found)


def _is_compared(key: str, value: Any) -> bool:
    if key == "params" or key in KERNELS or value is None or value is False:
        return False
    return key in MAY_BE_WHOLE or value is True or not isinstance(value, Integral)


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
    return zlib.crc32(repr([(what, value) for what, value, _ in settings]).encode()) >> (32 - DIGEST_BITS)


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
    there = {setting.what: setting for setting in settings[first]}
    for rank in sorted(settings):
        here = {setting.what: setting for setting in settings[rank]}
        for what in [*here, *(name for name in there if name not in here)]:
            mine, other = here.get(what), there.get(what)
            values = [setting.value if setting else "not set" for setting in (mine, other)]
            if values[0] != values[1]:
                group = (mine or there[what]).group
                return f"{what}{group} is {values[0]} on rank {rank} and {values[1]} on rank {first}"
    return None

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

# Of a param group, what users and schedulers set. Other entries may be an algorithm's own: a count, an estimate, made
# only on ranks that have something to step; or a choice of kernel, which hosts may make differently.
COMPARED = frozenset(
    ("lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "maximize", "amsgrad", "alpha", "rho")
    + ("centered", "lambd", "lr_decay", "momentum_decay", "beta2_decay", "etas", "step_sizes", "max_lr", "min_lr")
)


class Setting(NamedTuple):
    """One number, in words. `group` is what a user calls the param group: for messages, and never compared."""

    what: str
    value: str
    group: str = ""


Settings = tuple[Setting, ...]


def settings_of(groups: Iterable[Mapping[str, Any]], others: Mapping[str, Any]) -> Settings:
    """What the next step is made with: COMPARED of torch param groups, and `others`, in one order on all ranks.

    Off (None, False) is the same as not listed. Tensors are read where that does not wait for a device.
    """
    found = [Setting(name, text) for name in sorted(others) if (text := _text(others[name])) is not None]
    for index, group in enumerate(groups):
        where, name = f" of param group {index}", f" ({group['name']})" if "name" in group else ""
        found += [
            Setting(key + where, text, name)
            for key in sorted(COMPARED & group.keys())
            if (text := _text(group[key])) is not None
        ]
    return tuple(found)


def _text(value: Any) -> str | None:
    """A number in words, equal where it is meant to be equal; None where it is none, or off. Common kinds first: every
    step asks.
    """
    kind = type(value)
    if kind is float:
        return f"{value:.{DIGITS}g}"
    if value is None or value is False or kind is str:
        return None
    if kind is bool or kind is int:
        return str(value)
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

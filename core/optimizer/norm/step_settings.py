"""Step settings: all ranks must step with the same learning rates, decay and limits. Compared in every step.

Ranks hold parts, or copies, of the same parameters. A scheduler that looks at a metric of its own rank, or a loss scale
that went another way on one, would train them apart, and no gradient would show it.

The comparison rides on the sum that the norm needs anyway. Each rank adds a digest d of its settings to one sum and
d * d to another one. By Cauchy and Schwarz n * sum(d * d) >= sum(d) ** 2 over n ranks, and both sides are equal only
where all digests are. Up to 2**17 ranks the sums stay at or below 2**53, so they are exact in fp64.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch

DIGEST_BITS = 18
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
    """Settings of the next step: COMPARED of torch param groups, and `others`, in one order on all ranks.

    Off (None, False) is the same as not listed. Tensors are read where that does not wait for a device.
    """
    places = [(others, "", "")]
    for index, group in enumerate(groups):
        listed = {key: group[key] for key in COMPARED & group.keys()}
        places.append((listed, f" of param group {index}", f" ({group['name']})" if "name" in group else ""))
    return tuple(
        Setting(key + where, text, name)
        for listed, where, name in places
        for key in sorted(listed)
        if (text := _text(listed[key])) is not None
    )


def _text(value: Any) -> str | None:
    """A number in words, equal where it is meant to be equal. None for what is off, and for what is no number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, (tuple, list)):
        parts = [_text(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(value, bool):
        return "True" if value else None
    return f"{float(value):.{DIGITS}g}" if isinstance(value, Real) else None


def digest(settings: Settings) -> int:
    """The values in DIGEST_BITS bits."""
    return zlib.crc32(repr([(what, value) for what, value, _ in settings]).encode()) >> (32 - DIGEST_BITS)


def digest_terms(settings: Settings, *, problem: bool = False) -> tuple[int, int]:
    """This rank's part of the two sums: d and d * d. A problem adds 1 to the second sum, so they cannot match."""
    own = digest(settings)
    return own, own * own + problem


def same_digest(ranks: int, total: float, squares: float) -> bool:
    """True if the sums over so many ranks say that all settings are equal, and that no rank has a problem."""
    return ranks * int(squares) == int(total) ** 2


def first_difference(settings: Mapping[int, Settings]) -> str | None:
    """Name two ranks that differ, and where; None if all agree. Pure. settings: of each global rank."""
    first = min(settings)
    there = {setting.what: setting for setting in settings[first]}
    for rank in sorted(settings):
        here = {setting.what: setting for setting in settings[rank]}
        for what, setting in (here | there).items():
            mine, other = (held[what].value if what in held else "not set" for held in (here, there))
            if mine != other:
                group = here.get(what, setting).group
                return f"{what}{group} is {mine} on rank {rank} and {other} on rank {first}"
    return None

"""Step settings: a check in every step that all ranks use the same learning rates, decay and limits.

Ranks hold parts, or copies, of the same parameters. A scheduler that reads its own rank's metric, or a loss scale that
diverged on one rank, would train them differently, and no gradient would show it.

The comparison needs no extra collective, because it is part of the sum for the norm. Each rank adds a digest d of its
settings to one sum and d * d to another. By Cauchy and Schwarz n * sum(d * d) >= sum(d) ** 2 over n ranks, with
equality only if all digests are equal. Up to 2**17 ranks the sums stay at or below 2**53, so they are exact in fp64.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch

DIGEST_BITS = 18
DIGITS = 6  # significant digits of a float: different hosts may compute a cosine with a different last bit

# Entries of a param group that users and schedulers set. Other entries may belong to an algorithm: a count or an
# estimate that exists only on ranks with parameters to step, or a choice of kernel, which may differ between hosts.
COMPARED = frozenset(
    ("lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "maximize", "amsgrad", "alpha", "rho")
    + ("centered", "lambd", "lr_decay", "momentum_decay", "beta2_decay", "etas", "step_sizes", "max_lr", "min_lr")
)


class Setting(NamedTuple):
    """Name and value of one setting as text.

    ``group`` is the user's name of the param group. It is printed in messages and never compared.
    """

    what: str
    value: str
    group: str = ""


Settings = tuple[Setting, ...]


def settings_of(groups: Iterable[Mapping[str, Any]], others: Mapping[str, Any]) -> Settings:
    """Return the settings of the next step, in the same order on all ranks.

    Only the COMPARED entries of param groups are read. A setting that is off (None, False) counts as absent. Tensors
    are read only if this does not synchronize with a device.
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
    """Return a number as text, equal for numbers meant to be equal, or ``None`` for other values or if it is off."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, (tuple, list)):
        parts = [_text(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if isinstance(value, bool):
        return "True" if value else None
    return f"{float(value):.{DIGITS}g}" if isinstance(value, Real) else None


def digest(settings: Settings) -> int:
    """Return a hash of the settings' values with DIGEST_BITS bits."""
    return zlib.crc32(repr([(what, value) for what, value, _ in settings]).encode()) >> (32 - DIGEST_BITS)


def digest_terms(settings: Settings, *, problem: bool = False) -> tuple[int, int]:
    """Return this rank's contribution to the two sums: d and d * d.

    A ``problem`` adds 1 to the second sum, so that the sums cannot match.
    """
    own = digest(settings)
    return own, own * own + problem


def same_digest(ranks: int, total: float, squares: float) -> bool:
    """Return ``True`` if all ranks have equal settings, from the sum of the digests and the sum of their squares."""
    return ranks * int(squares) == int(total) ** 2


def first_difference(settings: Mapping[int, Settings]) -> str | None:
    """Describe the first setting that differs between two ranks, or return ``None`` if all agree."""
    first = min(settings)
    there = {setting.what: setting for setting in settings[first]}
    for rank in sorted(settings):
        here = {setting.what: setting for setting in settings[rank]}
        for what, setting in (here | there).items():
            mine, other = (known[what].value if what in known else "not set" for known in (here, there))
            if mine != other:
                group = here.get(what, setting).group
                return f"{what}{group} is {mine} on rank {rank} and {other} on rank {first}"
    return None

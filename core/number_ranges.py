"""Valid ranges for numeric configuration fields, and suggestions for numbers that do not divide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """Range of a number. NaN and bools are never in range, and the float 2.0 does not count as an integer."""

    kind: type  # Integral or Real
    low: float
    high: float
    open_low: bool = False  # True if `low` itself is outside
    open_high: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, self.kind):
            return False
        above = value > self.low if self.open_low else value >= self.low  # type: ignore[operator]
        return above and (value < self.high if self.open_high else value <= self.high)  # type: ignore[operator]

    def __str__(self) -> str:
        finite = self.kind is Real and self.open_high and self.high == math.inf
        words = "an integer" if self.kind is Integral else "a finite number" if finite else "a number"
        if self.low > -math.inf:
            words += f" {'above' if self.open_low else 'of at least'} {self.low}"
        if self.high < math.inf:
            words += f" and {'below' if self.open_high else 'at most'} {self.high}"
        return words


def whole(low: float = -math.inf, high: float = math.inf) -> Range:
    """Return the range of integers from ``low`` to ``high``."""
    return Range(Integral, low, high)


COUNT = whole(1)
NOT_NEGATIVE = Range(Real, 0, math.inf, open_high=True)
POSITIVE = Range(Real, 0, math.inf, open_low=True, open_high=True)
POSITIVE_OR_INFINITE = Range(Real, 0, math.inf, open_low=True)
BELOW_ONE = Range(Real, 0, 1, open_high=True)


def check_ranges(config: Any, ranges: Mapping[str, Range], name: Callable[[str], str] = str) -> None:
    """Check a dataclass's fields against ``ranges``, and that fields annotated as bool are bools.

    ``None`` is accepted if it is the field's default. ``name`` maps a field to its spelling in the error message.

    Raises:
        ValueError: For the first field outside its range.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if value is None and field.default is None:
            continue
        if field.name in ranges and value not in ranges[field.name]:
            allowed = f"{ranges[field.name]}{', or None' if field.default is None else ''}"
        elif field.type in (bool, "bool") and not isinstance(value, bool):
            allowed = "True or False"
        else:
            continue
        raise ValueError(f"{name(field.name)} must be {allowed}, got {value!r}")


def nearest_multiples(size: int, of: int) -> list[int]:
    """Return the positive multiples of ``of`` closest to ``size``, below and above."""
    below = size // of * of
    return [below, below + of] if below > 0 else [of]


def divisors(size: int) -> list[int]:
    """Return all divisors of ``size`` in ascending order."""
    low = [divisor for divisor in range(1, math.isqrt(size) + 1) if size % divisor == 0]
    return sorted({*low, *(size // divisor for divisor in low)})


def nearest_divisors(size: int, near: int) -> list[int]:
    """Return the divisors of ``size`` closest to ``near``, below and above."""
    known = divisors(size)
    below = [divisor for divisor in known if divisor < near]
    return [*below[-1:], *[divisor for divisor in known if divisor > near][:1]]


def either(numbers: Iterable[int]) -> str:
    """Join numbers for an error message, such as "2 or 4"."""
    return " or ".join(str(number) for number in numbers)

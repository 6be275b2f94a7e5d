"""Pairwise covering: few combinations of values in which every two values that can stand together do. Pure.

Errors live where two axes meet far more often than where three do, and all pairs need dozens of combinations where all
combinations would need millions. Which values can stand together is asked of constraints, each over a few axes, so that
a search knows early that a choice leads nowhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Pair = tuple[str, Any, str, Any]  # (axis, value, another axis, value), axes in their order


@dataclass(frozen=True)
class Constraint:
    """What holds between some axes. `allows`: their values, in this order -> may they stand together?"""

    axes: tuple[str, ...]
    allows: Callable[..., bool]


@dataclass(frozen=True)
class Covering:
    """cases: what to run. impossible: pairs that no case can hold, whatever the other axes are."""

    cases: tuple[dict[str, Any], ...]
    impossible: frozenset[Pair]


def cover_pairs(
    axes: Mapping[str, Sequence[Any]], constraints: Sequence[Constraint], given: Sequence[Mapping[str, Any]] = ()
) -> Covering:
    """Cases that hold every possible pair of values. The same ones at every call.

    axes: their values, the cheapest first: it is taken where nothing is gained by another. given: cases that run
    anyway; what they hold need not be covered again.

    Greedy, after AETG (Cohen et al., 1997): a case begins with a pair that is still missing, and grows by the values
    that bring most missing pairs, as long as a legal case remains within reach.
    """
    search = _Search(axes, constraints)
    missing = dict.fromkeys(pairs_of_axes(axes))  # a set, in a known order
    for case in given:
        _forget(missing, case)
    impossible: set[Pair] = set()
    cases: list[dict[str, Any]] = []
    while missing:
        first, value, second, other = next(iter(missing))
        case = {first: value, second: other}
        if search.complete(case) is None:
            impossible.add((first, value, second, other))
            del missing[first, value, second, other]
            continue
        for axis in search.order:
            if axis not in case:
                case[axis] = _best_value(axis, axes[axis], case, missing, search)
        cases.append({axis: case[axis] for axis in axes})
        _forget(missing, case)
    return Covering(tuple(cases), frozenset(impossible))


def pairs_of_axes(axes: Mapping[str, Sequence[Any]]) -> list[Pair]:
    """All pairs of values of different axes, possible or not."""
    return [
        (first, value, second, other)
        for first, second in itertools.combinations(axes, 2)
        for value in axes[first]
        for other in axes[second]
    ]


def pairs_of_case(axes: Mapping[str, Sequence[Any]], case: Mapping[str, Any]) -> list[Pair]:
    """The pairs that one case holds."""
    return [(first, case[first], second, case[second]) for first, second in itertools.combinations(axes, 2)]


def _best_value(
    axis: str, values: Sequence[Any], case: dict[str, Any], missing: Mapping[Pair, None], search: _Search
) -> Any:
    """The value that brings most missing pairs with what is chosen; of equal ones the first, so the cheapest."""

    def gain(value: Any) -> int:
        return sum(search.pair(axis, value, other, chosen) in missing for other, chosen in case.items())

    for value in sorted(values, key=gain, reverse=True):  # stable
        if search.complete({**case, axis: value}) is not None:
            return value
    raise AssertionError(f"a case that could be completed cannot be: {case}, axis {axis!r}")


def _forget(missing: dict[Pair, None], case: Mapping[str, Any]) -> None:
    for pair in [p for p in missing if case.get(p[0], _NONE) == p[1] and case.get(p[2], _NONE) == p[3]]:
        del missing[pair]


_NONE = object()


class _Search:
    """Finds legal cases that hold given values."""

    def __init__(self, axes: Mapping[str, Sequence[Any]], constraints: Sequence[Constraint]) -> None:
        self.axes = axes
        self.position = {axis: number for number, axis in enumerate(axes)}
        self.constraints = [c for c in constraints if set(c.axes) <= set(axes)]
        if len(self.constraints) != len(constraints):
            unknown = {axis for c in constraints for axis in c.axes} - set(axes)
            raise ValueError(f"constraints read {sorted(unknown)}, which are no axes; the axes are {', '.join(axes)}")
        self.of_axis = {axis: [c for c in self.constraints if axis in c.axes] for axis in axes}
        self.known: dict[tuple[Any, ...], bool] = {}  # what constraints said: they are asked the same again and again
        # Constraint by constraint, the largest first: a choice that leads nowhere is noticed after few others.
        bound = [axis for c in sorted(self.constraints, key=lambda c: -len(c.axes)) for axis in c.axes]
        self.order = list(dict.fromkeys([*bound, *axes]))

    def pair(self, axis: str, value: Any, other: str, chosen: Any) -> Pair:
        """In the order of the axes."""
        if self.position[axis] < self.position[other]:
            return axis, value, other, chosen
        return other, chosen, axis, value

    def complete(self, case: Mapping[str, Any]) -> dict[str, Any] | None:
        """A legal case that holds these values, the first in the order of values; None where there is none."""
        whole = dict(case)
        if not all(self._holds(c, whole) for c in self.constraints):
            return None
        return whole if self._extend(whole, [axis for axis in self.order if axis not in case]) else None

    def _extend(self, case: dict[str, Any], left: list[str]) -> bool:
        if not left:
            return True
        axis, *others = left
        for value in self.axes[axis]:
            case[axis] = value
            if all(self._holds(c, case) for c in self.of_axis[axis]) and self._extend(case, others):
                return True
        del case[axis]
        return False

    def _holds(self, constraint: Constraint, case: Mapping[str, Any]) -> bool:
        """Also while some of its axes are open."""
        if not all(axis in case for axis in constraint.axes):
            return True
        values = tuple(case[axis] for axis in constraint.axes)
        key = (id(constraint), values)
        if key not in self.known:
            self.known[key] = constraint.allows(*values)
        return self.known[key]

"""Differences of two tensors, from their sketches. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from core.verify.record.file import Entry
from core.verify.record.sketches import PROJECTIONS


def comparable(a: Entry | None, b: Entry | None) -> bool:
    """Return True if both are sketches of one tensor, in equal parts."""
    return a is not None and b is not None and a.numel == b.numel and a.width == b.width >= 0


def difference(a: Entry, b: Entry, factor: float, floor: float) -> float:
    """Estimate the norm of the difference of two tensors relative to their norm, or to `floor` if that is larger."""
    if a.digest == b.digest and factor == 1.0:
        return 0.0
    if not all(map(math.isfinite, (*a.numbers, *b.numbers))):
        return 0.0 if not (math.isfinite(a.numbers[0]) or math.isfinite(b.numbers[0])) else math.nan
    rows = min(len(a.numbers), len(b.numbers)) if a.width else 0
    squared = [slice(0, 1), slice(1 + PROJECTIONS, rows)]
    linear = root_mean_square([y / factor - x for x, y in zip(projected(a), projected(b), strict=True)])
    squares = root_mean_square(
        [y / factor**2 - x for part in squared for x, y in zip(a.numbers[part], b.numbers[part], strict=True)]
    )
    size = max(norm(a), norm(b) / factor, floor)
    sums = [root_mean_square(projected(entry)) for entry in (a, b)]
    size = max(size, sums[0], sums[1] / factor)
    return max(linear, squares / (2 * size)) / size if size else 0.0


def distance(a: Mapping[str, Entry], b: Mapping[str, Entry]) -> float:
    """Return the distance of all weights that both runs have, relative to their norm."""
    names = [name for name in a if comparable(a[name], b.get(name))]
    apart = sum((difference(a[name], b[name], 1.0, 0.0) * norm(a[name])) ** 2 for name in names)
    size = sum(norm(a[name]) ** 2 for name in names)
    return math.sqrt(apart / size) if size else 0.0


def from_own_weights(outputs: Mapping[str, Entry], a: Mapping[str, Entry], b: Mapping[str, Entry]) -> dict[str, float]:
    """Return the error of each output that its module's own weights explain.

    Adam moves a weight of which the loss does not depend by rounding alone, such as the bias of attention's keys.
    """
    found: dict[str, float] = {}
    for name in a:
        module = name.rpartition(".")[0]
        output = outputs.get(module)
        if output is None or not output.width or not comparable(a[name], b.get(name)):
            continue
        error = difference(a[name], b[name], 1.0, 0.0)
        if a[name].numel == output.width:  # a bias is added to every row, and a sketch adds the rows
            size = max(norm(output), root_mean_square(projected(output)))
            rows = output.numel / output.width
            error = max(error, rows * error * max(norm(a[name]), norm(b[name])) / size if size else 0.0)
        found[module] = max(error, found.get(module, 0.0))
    return found


def common_ratio(a: Mapping[str, Entry], b: Mapping[str, Entry], names: Sequence[str]) -> float | None:
    """Return the factor between two runs' gradients if all have one."""
    ratios = [norm(b[name]) / norm(a[name]) for name in names if norm(a[name])]
    if not ratios or not max(ratios) - min(ratios) <= 1e-2 * max(ratios):
        return None
    return sorted(ratios)[len(ratios) // 2]


def projected(entry: Entry) -> tuple[float, ...]:
    """Return the projections."""
    return entry.numbers[1 : 1 + PROJECTIONS]


def norm(entry: Entry) -> float:
    """Return the norm of a tensor."""
    return math.sqrt(max(entry.numbers[0], 0.0))


def rms(entry: Entry) -> float:
    """Return the root mean square of a tensor's elements."""
    return norm(entry) / math.sqrt(max(entry.numel, 1))


def root_mean_square(values: Sequence[float]) -> float:
    """Return the root mean square of numbers."""
    return math.sqrt(sum(value * value for value in values) / len(values))

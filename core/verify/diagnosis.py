"""Find the cause of a wrong gradient from each rank's values before and after the reductions. Pure functions.

A reduced gradient is a sum of the ranks' own gradients, each with some factor. The actual factors are found by least
squares and compared with those that give the reference. A missing rank has factor 0, a rank added twice has 2, and a
wrong divisor gives all ranks the same wrong factor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from core.groups.rank_grid import AXES, COPY_AXES

# Gradients are averaged over these.
DATA_AXES = (
    *(axis.label for axis in AXES if axis.name not in (*COPY_AXES, "pp")),
    *("optimizer instances", "dp inside an instance", "expert dp inside an instance"),
)
SAME = 1e-3  # factors this close are equal; far above round-off, far below any wrong divisor
NO_SUM = "the gradient is no sum of the ranks' gradients"
NO_SIZE = "which is no size of this layout"
ELSEWHERE = "the gradient points elsewhere than the reference"
BEFORE = "the ranks' own gradients do not add up to the reference"


class Explanation(NamedTuple):
    """Likely cause of a wrong gradient.

    Attributes:
        cause: A sentence for the report.
        details: A line for each wrong rank.
        of_reduction: False if the fault is before the reductions.
    """

    cause: str
    details: tuple[str, ...] = ()
    of_reduction: bool = True


@dataclass(frozen=True)
class RankPart:
    """One rank's gradient of one parameter, over the same sample of elements on all ranks.

    Attributes:
        rank: The rank.
        place: Its index on each axis, such as {'dp': 1, 'tp': 0}.
        local: [sample] Its own gradient, before any reduction.
        reduced: [sample] The gradient after the last reduction.
        expected: [sample] The reference's gradient.
        valid: [sample] bool, elements whose reduced gradient this rank holds.
        auxiliary: [sample] Contribution of auxiliary losses to ``expected``, if any.
    """

    rank: int
    place: Mapping[str, int]
    local: Tensor
    reduced: Tensor
    expected: Tensor
    valid: Tensor
    auxiliary: Tensor | None = None


@dataclass(frozen=True)
class Mixture:
    """Factor of each rank's part in a gradient, relative to the right factor.

    Attributes:
        rank: The rank that holds the gradient.
        times: rank -> factor, 1.0 if right. Ranks with equal parts are represented by the first of them.
    """

    rank: int
    times: Mapping[int, float]

    @property
    def factor(self) -> float | None:
        """Common factor of all parts; None if they differ."""
        values = list(self.times.values())
        return values[0] if all(_same(value, values[0]) for value in values) else None

    @property
    def present(self) -> frozenset[int]:
        """Ranks whose parts are in the gradient."""
        return frozenset(rank for rank, times in self.times.items() if abs(times) > SAME)


def explain(
    parts: Sequence[RankPart],
    sizes: Mapping[str, int],
    suspects: Sequence[str],
    *,
    tokens: float | None = None,
    microbatches: int = 1,
) -> Explanation:
    """Find the likely cause of a wrong gradient.

    ``suspects`` are the axes over which all wrong parameters and no right ones are reduced. ``tokens`` is the number of
    tokens of the global batch, or None if the loss is a mean.
    """
    weight = _weight_of_auxiliary(parts)
    if weight is not None:
        weight = 0.0 if abs(weight) < SAME else weight  # round-off
        reason = _name_auxiliary(weight, sizes.get("cp", 1), microbatches)
        return Explanation(f"auxiliary losses have {weight:.6g} times their due weight relative to the loss{reason}")
    classes = _representatives(parts)
    columns = sorted(set(classes.values()))
    by_rank = {part.rank: part for part in parts}
    mixtures: list[Mixture] = []
    details: list[str] = []
    for part in parts:
        if not bool(part.valid.any()):
            continue
        matrix = torch.stack([by_rank[rank].local[part.valid] for rank in columns], 1) if columns else None
        right = fit(matrix, part.expected[part.valid])
        if right is None:
            return _by_ratio(parts, sizes, suspects, tokens, microbatches)
        if isinstance(right, str):
            return Explanation(
                f"{BEFORE}, so backward is wrong before any reduction: a layer's backward, or the data or the weights "
                "of a rank",
                of_reduction=False,
            )
        found = fit(matrix, part.reduced[part.valid])
        if found is None or isinstance(found, str):
            return Explanation(
                f"{NO_SUM}: memory was overwritten, a slice lies elsewhere, or another step's gradients were mixed in"
            )
        strange = [
            rank
            for rank, have, want in zip(columns, found, right, strict=True)
            if abs(want) < SAME * max(map(abs, right)) and abs(have) > SAME * max(map(abs, right))
        ]
        if strange:
            return Explanation(
                f"rank {part.rank} also holds the gradient of ranks {strange}, which is not of this parameter"
            )
        times = {
            rank: have / want
            for rank, have, want in zip(columns, found, right, strict=True)
            if abs(want) >= SAME * max(map(abs, right))
        }
        mixtures.append(Mixture(part.rank, times))
    wrong = [m for m in mixtures if m.factor is None or not _same(m.factor, 1.0)]
    details += [f"rank {m.rank} has " + _in_words(m) for m in wrong]
    if not wrong:
        return Explanation(
            "each rank's part is there as often as it should be; the difference is smaller than a part",
            of_reduction=False,
        )
    cause = _name(wrong, mixtures, parts, classes, sizes, suspects, tokens, microbatches)
    return Explanation(cause, tuple(details), NO_SIZE not in cause)


def _weight_of_auxiliary(parts: Sequence[RankPart]) -> float | None:
    """Return the weight of the auxiliary losses if a wrong weight alone explains the error on every rank."""
    weights = []
    for part in parts:
        if part.auxiliary is None or not bool(part.valid.any()):
            continue
        due, excess = part.auxiliary[part.valid], (part.reduced - part.expected)[part.valid]
        size = float(due @ due)
        if size == 0.0 or float(due.norm()) < SAME * float(part.expected[part.valid].norm()):
            continue
        weight = 1.0 + float(excess @ due) / size
        if _same(weight, 1.0) or float((excess - (weight - 1.0) * due).norm()) > SAME * float(excess.norm()):
            return None
        weights.append(weight)
    return weights[0] if weights and all(_same(weight, weights[0]) for weight in weights) else None


def _name_auxiliary(weight: float, cp: int, microbatches: int) -> str:
    if microbatches > 1 and _same(weight, microbatches):
        return f": they are not divided by the number of microbatches, {microbatches} (auxiliary_loss_scale)"
    if microbatches > 1 and _same(weight * microbatches, 1.0):
        return f": they are divided by the number of microbatches, {microbatches}, twice (auxiliary_loss_scale)"
    if cp > 1 and _same(weight * cp, 1.0):
        return f": the ranks of cp ({cp}) share them, and they are divided by cp as the loss is, once too often"
    return ""


@dataclass(frozen=True)
class BiasPart:
    """One rank's part of a router.

    Attributes:
        rank: The rank.
        place: Its index on each axis.
        counts: Tokens per expert on this rank.
        moved: Change of the bias per expert.
    """

    rank: int
    place: Mapping[str, int]
    counts: Sequence[int]
    moved: Sequence[float]


def explain_bias(parts: Sequence[BiasPart], rate: float) -> str:
    """Describe which ranks' token counts moved a router's bias."""
    axes = [axis for axis in parts[0].place if len({part.place[axis] for part in parts}) > 1]
    for left_out in (chosen for count in range(len(axes) + 1) for chosen in itertools.combinations(axes, count)):
        for factor in (1.0, 2.0, 0.5, 0.0, -1.0):
            if all(_moved_by(part, parts, left_out, rate * factor) for part in parts):
                how = [f"by counts that are not added over {' and '.join(left_out)}"] if left_out else []
                how += [f"{factor:g} times as far as moe_router_bias_update_rate says"] if factor != 1.0 else []
                if how:
                    return f"the router's bias moved {' and '.join(how)}"
                return "this step's counts give the right bias, so those of another step were left among them"
    return "the router's bias did not move by this step's counts: others were left among them, or ranks disagree"


def _moved_by(part: BiasPart, parts: Sequence[BiasPart], left_out: Sequence[str], rate: float) -> bool:
    """True if the bias moved by the counts of the ranks that share this rank's index on these axes."""
    added = [other.counts for other in parts if all(other.place[a] == part.place[a] for a in left_out)]
    totals = [sum(counts) for counts in zip(*added, strict=True)]
    mean = sum(totals) / len(totals)
    want = [rate * ((total < mean) - (total > mean)) for total in totals]
    return all(
        math.isclose(a, b, rel_tol=SAME, abs_tol=SAME * abs(rate) + 1e-9) for a, b in zip(part.moved, want, strict=True)
    )


def name_factor(
    factor: float,
    sizes: Mapping[str, int],
    suspects: Sequence[str],
    *,
    tokens: float | None = None,
    microbatches: int = 1,
) -> str:
    """Describe mistakes that multiply a gradient by ``factor``, actual over expected, most likely first."""
    if abs(factor) <= SAME:
        return "it is zero: the gradient never arrives, or was overwritten"
    axes = [axis for axis in suspects if sizes.get(axis, 1) > 1]
    others = [axis for axis in sizes if axis not in axes and sizes[axis] > 1]
    found = [text for axis in axes if (text := _axis_factor(factor, axis, sizes[axis]))]
    if tokens is not None and tokens > 1:
        if _same(factor, tokens):
            found.append(f"{tokens:.10g} times too large, the number of tokens: it is not divided by them")
        elif _same(factor * tokens, 1.0):
            found.append(f"{tokens:.10g} times too small, the number of tokens: it is divided by them twice")
    if microbatches > 1:
        if _same(factor, microbatches):
            found.append(f"{microbatches} times too large, the number of microbatches: not divided by it")
        elif _same(factor * microbatches, 1.0):
            found.append(
                f"{microbatches} times too small, the number of microbatches: divided by it twice, or one of them left"
            )
    if not found:
        if _same(factor, 2.0):
            over = f" over {' or '.join(axes)}" if axes else ""
            found.append(f"twice too large: its reduction{over} was done twice, or a backward was")
        found += [text for axis in others if (text := _axis_factor(factor, axis, sizes[axis]))]
    for first in axes + others:
        for second in axes + others:
            if not found and first != second:
                product = sizes[first] * sizes[second]
                if _same(factor, product) or _same(factor * product, 1.0):
                    size = "large" if factor > 1 else "small"
                    found.append(f"{first} x {second} = {product} times too {size}")
    left = round(factor * microbatches)
    if not found and 1 < left < microbatches and _same(factor * microbatches, left):
        found.append(
            f"{left}/{microbatches} is there: {microbatches - left} of {microbatches} microbatches are left out, "
            "or cleared by a late zero_grad"
        )
    if not found and tokens is not None and _same(tokens / factor, round(tokens / factor)):
        found.append(f"it is divided by {round(tokens / factor)} tokens, and the whole batch has {tokens:.10g}")
    return "; or ".join(found) or f"it is {factor:.6g} times the reference, {NO_SIZE}"


def _axis_factor(factor: float, axis: str, size: int) -> str | None:
    data = axis in DATA_AXES
    if _same(factor, size):
        reason = "added where the mean was due" if data else "added though every rank had the whole, or added"
        return f"{axis} times too large ({axis} is {size}): {reason}{' or reduced twice' if data else ' twice'}"
    if _same(factor * size, 1.0):
        reason = "1/n twice" if data else "the mean was taken where the sum was due"
        return f"{axis} times too small ({axis} is {size}): {reason}"
    return None


def _name(
    wrong: Sequence[Mixture],
    mixtures: Sequence[Mixture],
    parts: Sequence[RankPart],
    classes: Mapping[int, int],
    sizes: Mapping[str, int],
    suspects: Sequence[str],
    tokens: float | None,
    microbatches: int,
) -> str:
    factors = [m.factor for m in wrong]
    if all(f is not None and factors[0] is not None and _same(f, factors[0]) for f in factors):
        where = "" if len(wrong) == len(mixtures) else f" on ranks {[m.rank for m in wrong]} only"
        assert factors[0] is not None, "compared above"
        return name_factor(factors[0], sizes, suspects, tokens=tokens, microbatches=microbatches) + where
    divisors = [tokens / f for f in factors if f] if tokens is not None else []
    if len(divisors) == len(wrong) and all(_same(divisor, round(divisor)) for divisor in divisors):
        numbers = [round(divisor) for divisor in divisors]
        return f"ranks {[m.rank for m in wrong]} divide by {numbers} tokens, and the whole batch has {tokens:.10g}"
    alone = [m.rank for m in wrong if m.present == {classes.get(m.rank, m.rank)} and len(m.times) > 1]
    places = {part.rank: part.place for part in parts}
    missing = [_missing_axes(m, places, sizes) for m in wrong]
    if missing and missing[0] and all(axes == missing[0] for axes in missing) and len(wrong) == len(mixtures):
        return f"not reduced over {' and '.join(missing[0])}: every rank holds the part of its own place there alone"
    if alone:
        which = f"rank {alone[0]}" if len(alone) == 1 else f"ranks {alone}"
        return f"unsynced on {which}: only the rank's own gradient is there"
    absent = [frozenset(m.times) - m.present for m in wrong]
    if absent[0] and all(ranks == absent[0] for ranks in absent):
        return f"the gradient of ranks {sorted(absent[0])} is missing everywhere"
    return "ranks' gradients are there with different factors; see the lines below"


def _missing_axes(mixture: Mixture, places: Mapping[int, Mapping[str, int]], sizes: Mapping[str, int]) -> list[str]:
    """Return the fewest axes along which a rank holds only its own part, if that describes exactly its gradient."""
    here, everyone = places[mixture.rank], frozenset(mixture.times)
    axes = [axis for axis in here if sizes.get(axis, 1) > 1]
    if mixture.present == everyone:
        return []
    for count in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            own = frozenset(r for r in everyone if all(places[r][axis] == here[axis] for axis in chosen))
            if own == mixture.present:
                return list(chosen)
    return []


def _in_words(mixture: Mixture) -> str:
    there = [f"{times:.4g} x rank {rank}" for rank, times in mixture.times.items() if rank in mixture.present]
    return ", ".join(there) or "nothing"


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SAME, abs_tol=SAME)


def _representatives(parts: Sequence[RankPart]) -> dict[int, int]:
    """Return rank -> first rank with the same gradient; ranks without any gradient are left out."""
    classes: dict[int, int] = {}
    firsts: list[RankPart] = []
    for part in parts:
        if not bool(part.local.any()) or part.local.shape != parts[0].local.shape:
            continue
        twin = next((f for f in firsts if _close(part.local, f.local)), None)
        if twin is None:
            firsts.append(part)
        classes[part.rank] = part.rank if twin is None else twin.rank
    return classes


def _close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= 1e-4 * float(other.norm())


def fit(matrix: Tensor | None, target: Tensor, close: float = SAME) -> list[float] | str | None:
    """Fit factors of the columns that add up to ``target``.

    Returns:
        The factors; a text if no factors fit; None if the columns cannot be distinguished.
    """
    if matrix is None or matrix.shape[0] < matrix.shape[1]:
        return None
    scale = matrix.norm(dim=0).clamp(min=1e-300)
    singular = torch.linalg.svdvals(matrix / scale)
    if float(singular[-1]) < 1e-4 * float(singular[0]):
        return None
    solution = torch.linalg.lstsq(matrix / scale, target.unsqueeze(1)).solution
    if float(((matrix / scale) @ solution - target.unsqueeze(1)).norm()) > close * max(float(target.norm()), 1e-300):
        return "no combination"
    return [float(value) for value in solution.squeeze(1) / scale]


def _by_ratio(
    parts: Sequence[RankPart],
    sizes: Mapping[str, int],
    suspects: Sequence[str],
    tokens: float | None,
    microbatches: int,
) -> Explanation:
    """Find one factor for all ranks, if there are too few elements to distinguish their parts."""
    factors = []
    for part in parts:
        have, want = part.reduced[part.valid], part.expected[part.valid]
        if want.numel() and float(want.norm()) > 0:
            factor = float(have @ want) / float(want @ want)
            if float((have - factor * want).norm()) > SAME * float(have.norm()):
                return Explanation(ELSEWHERE, of_reduction=False)
            factors.append(factor)
    wrong = [factor for factor in factors if not _same(factor, 1.0)]
    if wrong and all(_same(factor, wrong[0]) for factor in wrong):
        cause = name_factor(wrong[0], sizes, suspects, tokens=tokens, microbatches=microbatches)
        return Explanation(cause, of_reduction=NO_SIZE not in cause)
    return Explanation(f"factors {[round(f, 6) for f in factors]} on the ranks", of_reduction=False)

"""Find the module at which a fault begins among comparisons of all modules, in words and as a table. Pure functions."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Allowed error of a tensor, as a multiple of the reference's own error in the layout's dtype (docs: the margin).
ALLOWANCE = 8.0
RUN = 6  # longer runs of similar rows are shortened


@dataclass(frozen=True)
class Measured:
    """One comparison of a tensor.

    Attributes:
        error: Relative error.
        share: Error relative to the allowed error; above 1 is wrong.
        is_number: True for a tensor of one element, which can be right by chance.
    """

    error: float
    share: float
    is_number: bool = False

    @property
    def ok(self) -> bool:
        """True if the error is allowed; False for nan."""
        return self.share <= 1.0

    @property
    def level(self) -> float:
        """Decimal logarithm of the share, between -99 and 99."""
        return math.log10(max(self.share, 1e-99)) if self.share < 1e99 else 99.0


@dataclass(frozen=True)
class Row:
    """The worst comparisons of one module, by rank.

    Attributes:
        module: Name of the module.
        outputs: Comparisons of its outputs.
        gradients: Comparisons of the gradients at its outputs.
    """

    module: str
    outputs: Mapping[int, Measured] = field(default_factory=dict)
    gradients: Mapping[int, Measured] = field(default_factory=dict)


@dataclass(frozen=True)
class Where:
    """Module at which a fault begins; the same on all ranks.

    Attributes:
        rows: Modules in the order of forward.
        forward: First module with a wrong output, or None.
        backward: Last module with a wrong gradient at its output, or with wrong gradients of its own parameters only.
        lines: The result in words.
    """

    rows: tuple[Row, ...]
    forward: str | None = None
    backward: str | None = None
    lines: tuple[str, ...] = ()

    def table(self) -> str:
        """Format a table with one row per module, and one cell per rank for output and gradient.

        Rows are in the order of forward. A cell is log10 of the error over the allowed error, so above 0 is wrong.
        ``=`` means no error at all, a dot means not compared. Long runs of right rows are shortened.
        """
        ranks = sorted({rank for row in self.rows for rank in (*row.outputs, *row.gradients)})
        width = max([len(row.module) for row in self.rows] + [len("the whole model"), 24])
        heads = " ".join(f"{rank:>6}" for rank in ranks)
        lines = [f"{'':{width}}   {'output, rank':<{len(heads)}}   gradient, rank", f"{'':{width}}   {heads}   {heads}"]
        for calm, run in itertools.groupby(self.rows, lambda row: _right(row.outputs) and _right(row.gradients)):
            rows = list(run)
            shown = rows if not calm or len(rows) <= 3 else [rows[0], None, rows[-1]]
            for row in shown:
                if row is None:
                    lines.append(f"{f'... {len(rows) - 2} more':{width}}")
                    continue
                cells = [" ".join(_cell(found.get(rank)) for rank in ranks) for found in (row.outputs, row.gradients)]
                mark = "  <- here" if row.module in (self.forward, self.backward) else ""
                lines.append(f"{row.module or 'the whole model':{width}}   {cells[0]}   {cells[1]}{mark}")
        return "\n".join(lines)


def _cell(measured: Measured | None) -> str:
    text = "." if measured is None else "=" if measured.share == 0.0 else f"{measured.level:.1f}"
    return f"{text:>6}"


def in_any_layer(name: str) -> str:
    """Replace the numbers in a name, so that the same module of all layers has one name."""
    return re.sub(r"\d+", "*", name)


def largest_of_layers(costs: Mapping[str, float]) -> dict[str, float]:
    """Return the largest rounding error of a module or parameter over all layers.

    The error of a single layer can be small by chance.
    """
    found: dict[str, float] = {}
    for name, cost in costs.items():
        found[in_any_layer(name)] = max(cost, found.get(in_any_layer(name), 0.0))
    return found


# --- the verdict ------------------------------------------------------------------------------------------------------


def judge(
    rows: Sequence[Row],
    parameters: Sequence[str],
    wrong: Sequence[str],
    stale: Mapping[str, Mapping[int, float]],
    more_calls: Mapping[str, Mapping[int, int]],
) -> Where:
    """Find the modules where the fault begins. Pure.

    A layout may keep partial sums between modules. A wrong output is therefore excused if a module around it has the
    right output. A wrong gradient is excused if the module's own parameters have right gradients, or, without
    parameters, if the module before it has the right gradient.

    Args:
        rows: Comparisons of the modules, in the order of forward.
        parameters: Names of all trained parameters.
        wrong: Parameters with wrong gradients.
        stale: Modules whose recomputation differs, with the relative difference by rank.
        more_calls: Modules called more often than in the reference, with the number of calls by rank.
    """
    lines = [stale_line(name, found) for name, found in list(stale.items())[:1]]
    lines += [
        f"calls: {quoted(name)} runs {max(found.values())} times {in_ranks(found)}, more often than in the reference"
        for name, found in list(more_calls.items())[:1]
    ]
    excused = _excused_outputs(rows)
    forward = next((n for n, row in enumerate(rows) if not _right(row.outputs) and n not in excused), None)
    backward: int | None = None
    if forward is not None:  # gradients are then wrong too, and do not test backward
        lines.append(_forward_line(rows, forward))
    else:
        backward, said = _backward_line(rows, parameters, wrong)
        lines += said
    outputs, gradients = [row for row in rows if row.outputs], [row for row in rows if row.gradients]
    sums = sum(not _right(rows[n].outputs) for n in excused)
    wrong_outputs = sum(not _right(row.outputs) for row in outputs) - sums
    lines.append(
        f"compared: the outputs of {len(outputs)} modules, {wrong_outputs} wrong"
        f"{f', {sums} parts of sums' if sums else ''}; the gradients at {len(gradients)}, "
        f"{sum(not _right(row.gradients) for row in gradients)} wrong"
    )
    return Where(
        tuple(rows),
        None if forward is None else rows[forward].module,
        None if backward is None else rows[backward].module,
        tuple(lines),
    )


def _forward_line(rows: Sequence[Row], first: int) -> str:
    row = rows[first]
    before = next((r.module for r in reversed(rows[:first]) if r.outputs and _right(r.outputs)), None)
    return (
        f"forward: first wrong output {quoted(row.module)} {in_ranks(_wrong(row.outputs))}, {_size(row.outputs)}; "
        f"right before it: {'nothing that was compared' if before is None else quoted(before, row.module)}"
    )


def _backward_line(
    rows: Sequence[Row], parameters: Sequence[str], wrong: Sequence[str]
) -> tuple[int | None, list[str]]:
    """Return the row where the fault in backward begins, and a line that describes it."""
    last = _last_wrong_gradient(rows, parameters, wrong)
    own = _last_wrong_alone(rows, wrong)
    if own is not None and (last is None or own > last):
        module = rows[own].module
        names = [name.rpartition(".")[2] for name in wrong if name.rpartition(".")[0] == module]
        line = (
            f"the gradient is right at the output of {quoted(module)}, and that of its own {', '.join(names)} is wrong"
        )
        return own, [f"backward: {line}"]
    if last is None:
        return None, []
    row = rows[last]
    after = next((r.module for r in rows[last + 1 :] if r.gradients and _right(r.gradients)), None)
    found = f"{in_ranks(_wrong(row.gradients))}, {_size(row.gradients)}"
    if after is None:
        return last, [f"backward: the gradient is wrong from the loss on, first at {quoted(row.module)}, {found}"]
    line = f"right at the output of {quoted(after)} and wrong at that of {quoted(row.module, after)}, {found}"
    return last, [f"backward: the gradient is {line}"]


def _excused_outputs(rows: Sequence[Row]) -> set[int]:
    """Return rows whose output may be a partial sum, because a module around them has the right output."""
    right = {
        row.module
        for row in rows
        if row.outputs and _right(row.outputs) and not all(found.is_number for found in row.outputs.values())
    }
    return {number for number, row in enumerate(rows) if any(outer in right for outer in around(row.module))}


def _last_wrong_gradient(rows: Sequence[Row], parameters: Sequence[str], wrong: Sequence[str]) -> int | None:
    for number in reversed(range(len(rows))):
        row = rows[number]
        if _right(row.gradients):
            continue
        below = [name for name in parameters if is_in(name, row.module)]
        if below:
            excused = not any(name in wrong for name in below)
        else:
            earlier = [r for r in rows[:number] if r.gradients and not is_in(r.module, row.module)]
            excused = bool(earlier) and _right(earlier[-1].gradients)
        if not excused:
            return _innermost(rows, number)
    return None


def _innermost(rows: Sequence[Row], number: int) -> int:
    """Return the first row with the same gradient: a container may return its last child's output tensor."""
    while number and is_in(rows[number - 1].module, rows[number].module):
        if rows[number - 1].gradients != rows[number].gradients:
            break
        number -= 1
    return number


def _last_wrong_alone(rows: Sequence[Row], wrong: Sequence[str]) -> int | None:
    """Return the last module whose own parameters have wrong gradients although the gradient at its output is right."""
    owners = {name.rpartition(".")[0] for name in wrong}
    for number in reversed(range(len(rows))):
        row = rows[number]
        if row.module in owners and row.gradients and _right(row.gradients) and _right(row.outputs):
            return number
    return None


def around(module: str) -> Iterator[str]:
    """Yield the names of the modules around one, the innermost first; the full model is ''."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def is_in(name: str, module: str) -> bool:
    """True if a module or parameter is this module or is inside it."""
    return not module or name == module or name.startswith(f"{module}.")


def _right(found: Mapping[int, Measured]) -> bool:
    return all(measured.ok for measured in found.values())


def _wrong(found: Mapping[int, Measured]) -> list[int]:
    return [rank for rank, measured in found.items() if not measured.ok]


def _size(found: Mapping[int, Measured]) -> str:
    worst = max((m for m in found.values() if not m.ok), key=lambda m: (math.isnan(m.error), m.error))
    return f"relative error {worst.error:.2g} ({worst.error / worst.share:.2g} is allowed)"


def in_ranks(found: Sequence[int] | Mapping[int, Any]) -> str:
    """Describe ranks in words."""
    ranks = sorted(found)
    return f"on rank{'' if len(ranks) == 1 else 's'} {ranks}"


def quoted(module: str, after: str | None = None) -> str:
    """Quote a module's name; shorten it to its last part if ``after``, a name just mentioned, has the same parent."""
    parent, _, last = module.rpartition(".")
    if after is not None and parent and parent == after.rpartition(".")[0] and not last.isdigit():
        module = last
    return f"`{module}`" if module else "the whole model"


def stale_line(name: str, found: Mapping[int, float]) -> str:
    """Describe a module whose recomputation gave another output."""
    return (
        f"recomputation: {quoted(name)} gives another output in backward than in forward, {in_ranks(found)} (relative "
        f"difference {max(found.values()):.2g}): what it reads was changed in between"
    )

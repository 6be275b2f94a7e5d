"""``python -m core compare RUN RUN ...``: find the first difference between recorded runs of one model.

Two runs of one model never agree bit for bit in two layouts or dtypes. One rule decides in all tables: a difference
counts if it is more than ALLOWANCE times the largest of the dtype's rounding error, the error that has reached the
tensor from the weights and from tensors before it, and the error of the same tensor in earlier steps.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from core.verify.place import ALLOWANCE, Measured, Row, Where, in_any_layer, judge, quoted
from core.verify.record.file import TABLES, Entry, RecordedRun, RecordedStep, ranges, read_recording
from core.verify.record.sketches import LINEAR, ROWS
from core.verify.report import wrong_by_layer

Table = Mapping[str, Entry]
Errors = dict[str, Measured]

HALF = 2.0**-11  # smallest rounding unit of a 16-bit dtype
# Rounding error of one module in units, with and without 16 bits. 16-bit products are accumulated in fp32.
UNITS = {True: 2.0, False: 16.0}
NOISE = {True: 1e-2, False: 1e-3}  # a tensor smaller than this share of the largest one is round-off (check_gradients)
SAME_RATE = 1e-6  # relative
SAME_FACTOR = 1e-2  # relative


@dataclass(frozen=True)
class Comparison:
    """First difference between two recordings.

    Attributes:
        step: The step, or None without a difference beyond rounding.
        kind: 'data', 'weights' (before the step), 'output', 'gradient', 'update', or '' without a difference.
        module: The first module; for weights and updates the first parameter; '' for data.
        lines: The result in words.
        where: Comparisons of all modules, if an output or a gradient differs.
    """

    step: int | None = None
    kind: str = ""
    module: str = ""
    lines: tuple[str, ...] = ()
    where: Where | None = None

    @property
    def ok(self) -> bool:
        """True if rounding explains every difference."""
        return self.step is None

    def __str__(self) -> str:
        return "\n  ".join(self.lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare recordings with the first one; return 1 if one differs, 2 if one cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m core compare", description="Find the first difference between recorded runs of one model."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a recording, or the directory of a run")
    parser.add_argument(
        "--names",
        action="append",
        default=[],
        metavar="REGEX=NEW",
        help="rename modules and parameters of all runs but the first, by re.sub; may be repeated",
    )
    parser.add_argument("--table", action="store_true", help="show every module of the step that differs")
    try:
        asked = parser.parse_args(argv)
        if len(asked.runs) < 2:
            parser.error("two recordings are needed")
    except SystemExit as end:
        return int(end.code or 0)
    differ = False
    for other in asked.runs[1:]:
        try:
            if wrong := [text for text in asked.names if "=" not in text]:
                raise ValueError(f"--names {wrong[0]} has no '='; write --names 'REGEX=NEW', such as '^model\\.='")
            names = {pattern: new for pattern, _, new in (text.partition("=") for text in asked.names)}
            found = compare_recordings(asked.runs[0], other, names)
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(found)
        if asked.table and found.where is not None:
            print(found.where.table())
        differ = differ or not found.ok
    return int(differ)


def compare_recordings(first: Path | str, second: Path | str, names: Mapping[str, str] | None = None) -> Comparison:
    """Find the first step at which two recordings differ by more than rounding, and the module.

    Args:
        first: Recording, or the directory of a run.
        second: The other one; its layout, dtype and framework may differ.
        names: Regular expression -> replacement, applied to the second recording's names by ``re.sub``.

    Returns:
        The first difference.

    Raises:
        ValueError: If a recording cannot be read, or the two have no step or no parameter in common.
    """
    one, two = read_recording(Path(first)), read_recording(Path(second))
    for pattern, new in (names or {}).items():
        two = replace(two, steps={number: _renamed(step, pattern, new) for number, step in two.steps.items()})
    common = sorted(one.steps.keys() & two.steps.keys())
    if not common:
        raise ValueError(f"the recordings have no step in common: {ranges(one.steps)} and {ranges(two.steps)}")
    a, b = (run.steps[common[0]].tables["grads"] for run in (one, two))
    if not a.keys() & b.keys():
        shown = [", ".join([*table][:3]) or "none" for table in (a, b)]
        raise ValueError(
            f"the recordings have no parameter in common: {shown[0]}, ... and {shown[1]}, ...; map the names of the "
            "second one by --names REGEX=NEW"
        )
    title = f"{one.name} ({one.layout}) and {two.name} ({two.layout})"
    alone = []
    for run, other, mine, theirs in ((one, two, a, b), (two, one, b, a)):
        if steps := run.steps.keys() - other.steps.keys():
            alone.append(f"{ranges(steps)} of {run.name}")
        if more := mine.keys() - theirs.keys():
            alone.append(f"{len(more)} parameters of {run.name} such as {min(more)!r}")
    rest = [f"not compared: {'; '.join(alone)}"] if alone else []
    compared = _Steps(one, two)
    for number in common:
        found = compared.compare(number)
        if found is not None:
            return replace(found, lines=(f"{title}:", *found.lines, *rest))
    return Comparison(lines=(f"{title}, {ranges(common)}: {compared.summary()}", *rest))


def _renamed(step: RecordedStep, pattern: str, new: str) -> RecordedStep:
    try:
        tables = {
            table: rows if table == "data" else {re.sub(pattern, new, name): entry for name, entry in rows.items()}
            for table, rows in step.tables.items()
        }
    except (re.error, IndexError) as error:
        raise ValueError(f"--names {pattern}={new} is no regular expression with its replacement: {error}") from None
    return replace(step, tables=tables)


class _Steps:
    """Comparison of one step after the other, with the errors that earlier steps had."""

    def __init__(self, one: RecordedRun, two: RecordedRun) -> None:
        self.runs = one, two
        self.history: dict[tuple[str, str], float] = {}  # table and name in any layer -> largest error so far
        self.last = 0  # the last compared step
        self.is_equal = True  # bit for bit
        self.worst = 0.0, "", ""  # error, table, name
        self.drift: list[tuple[int, float]] = []  # step, distance of the weights before it

    def compare(self, number: int) -> Comparison | None:
        """Compare a step; None without a difference beyond rounding."""
        self.number, steps = number, [run.steps[number] for run in self.runs]
        eps = max(step.eps for step in steps)
        self.base, self.noise = UNITS[eps >= HALF] * eps, NOISE[eps >= HALF]
        self.seen: dict[tuple[str, str], float] = {}
        self.tables = {table: (steps[0].tables[table], steps[1].tables[table]) for table in TABLES}
        before = self.tables["before"]
        data = _other_data(*self.tables["data"], ALLOWANCE * self.base)
        found = Comparison(number, "data", lines=(f"step {number}, data: {data}",)) if data else None
        if found is None and not self.last:
            found = self._first_weights(before)
        elif found is None and self.last != number - 1:
            after = [run.steps[self.last].tables["after"] for run in self.runs]
            found = self._updates("weights", after, before, gap=number - self.last)
        if found is None:
            self.drift.append((number, _distance(*before)))
            found = self._modules(before) or self._updates("update", before, self.tables["after"])
        self.last = number
        self.history |= {key: max(error, self.history.get(key, 0.0)) for key, error in self.seen.items()}
        return found

    def _first_weights(self, before: Sequence[Table]) -> Comparison | None:
        errors, _ = self._measure("weights", before, [*before[0]], self.base)
        wrong = [name for name, found in errors.items() if not found.ok]
        if not wrong:
            return None
        line = (
            f"step {self.number}, weights: {len(wrong)} of {len(errors)} parameters differ before the step, first "
            f"{quoted(wrong[0])}, {_size(errors[wrong[0]])}: another seed, or another checkpoint?"
        )
        return Comparison(self.number, "weights", wrong[0], (line,))

    def _modules(self, before: Sequence[Table]) -> Comparison | None:
        """Compare outputs in the order of forward, gradients there in the order of backward, then parameters'."""
        one, two = self.tables["outputs"]
        names = [name for name in one if name in two]
        cost = max(self.base, self.drift[-1][1])
        own = _from_own_weights(one, *before)
        own = {name: own.get(_module(name), 0.0) for name in names}
        outputs, flowed = self._measure("outputs", (one, two), names, cost, own, flows=True)
        factor = _factor(*self.tables["gradients"], names)
        tables = self.tables["gradients"]
        at, flowed = self._measure("gradients", tables, names[::-1], flowed, factor=factor, flows=True)
        parameters = [*self.tables["grads"][0]]
        own = {name: at[owner].error for name in parameters if (owner := _owner(name)) in at and at[owner].ok}
        grads, _ = self._measure("grads", self.tables["grads"], parameters, flowed, own)
        wrong = [name for name, found in grads.items() if not found.ok]
        where = _where(names, outputs, at, grads, wrong)
        if where.forward is None and where.backward is None and not wrong:
            return None
        title = f"step {self.number}, {'gradient' if where.forward is None else 'output'}:"
        if where.forward is not None:
            row = next(row for row in where.rows if row.module == where.forward)
            earlier = [r.module for r in where.rows[: where.rows.index(row)] if r.outputs]
            line = f"the output of {quoted(where.forward)} differs, {_size(row.outputs[0])}; right before it: "
            line += quoted(earlier[-1]) if earlier else "nothing"
            return Comparison(self.number, "output", where.forward, (f"{title} {line}",), where)
        a, b = self.tables["grads"]
        ratios = [_norm(b[name]) / _norm(a[name]) for name in wrong if _norm(a[name])] or [math.nan]
        is_right = where.backward is not None and all(found.ok for found in at.values())
        if is_right and len(wrong) == len(grads) and max(ratios) - min(ratios) <= SAME_FACTOR * max(ratios):
            ratio = sorted(ratios)[len(ratios) // 2]
            line = f"every gradient is {ratio:.6g} times the first run's: the loss is weighted, or divided, differently"
            return Comparison(self.number, "gradient", "", (f"{title} {line}",), where)
        module, line = _backward(where, wrong, grads)
        layers = [wrong_by_layer(parameters, wrong)] if wrong else []
        return Comparison(self.number, "gradient", module, (f"{title} {line}", *layers), where)

    def _updates(self, kind: str, start: Sequence[Table], end: Sequence[Table], *, gap: int = 1) -> Comparison | None:
        """Compare the changes of the weights, which are sketches too.

        Adam divides a gradient by its size, so the sign of a tiny element decides a full step. An error e of a gradient
        may cost sqrt(e) of the update, and a tiny element its complete update. Parameters whose gradient is round-off
        are left out.
        """
        rates = [sorted(set(run.steps[self.number].rates)) for run in self.runs]
        is_other = len(rates[0]) != len(rates[1]) or any(
            abs(x - y) > SAME_RATE * max(abs(x), abs(y)) for x, y in zip(*rates, strict=True)
        )
        one, two = self.tables["grads"]
        largest = max(map(_rms, one.values()), default=0.0)
        moves: tuple[dict[str, Entry], dict[str, Entry]] = {}, {}
        explained = {}
        for name in one.keys() & two.keys():
            if _rms(one[name]) <= self.noise * largest or any(name not in table for table in (*start, *end)):
                continue
            for move, a, b in zip(moves, start, end, strict=True):
                move[name] = _minus(b[name], a[name])
            weight = max(_norm(table[name]) for table in (*start, *end))
            size = max(_norm(move[name]) for move in moves)
            error = max(self.base, self.seen.get(("grads", in_any_layer(name)), 0.0))
            tiny = 2 * math.sqrt(max(grads[name].numbers[-1] for grads in (one, two)) / one[name].numel)
            explained[name] = (math.sqrt(ALLOWANCE * error) + tiny) * gap / ALLOWANCE
            explained[name] += self.base * weight / size if size else 0.0
        errors, _ = self._measure("updates", moves, [name for name in one if name in explained], self.base, explained)
        wrong = [name for name, found in errors.items() if not found.ok]
        if not wrong and not (is_other and kind == "update"):
            return None
        line = {
            "update": f"step {self.number}, update",
            "weights": f"weights: they differ before step {self.number}, and after step {self.last} they did not; "
            "record every step",
        }[kind]
        line += f": the learning rates are {rates[0]} and {rates[1]}" if is_other else ""
        if wrong:
            ratio = _norm(moves[1][wrong[0]]) / (_norm(moves[0][wrong[0]]) or math.nan)
            line += (
                f"{'; ' if is_other else ': '}the gradients agree, and the updates of {len(wrong)} of {len(errors)} "
                f"parameters differ, first {quoted(wrong[0])}, which moves {ratio:.6g} times as far in the second run"
            )
        return Comparison(self.number, kind, wrong[0] if wrong else "", (line,))

    def _measure(
        self,
        kind: str,
        tables: Sequence[Table],
        names: Sequence[str],
        cost: float,
        explained: Mapping[str, float] | None = None,
        *,
        factor: float = 1.0,
        flows: bool = False,
    ) -> tuple[Errors, float]:
        """Compare tensors in this order. Return the comparisons, and the error that is explained in tensors after them.

        Args:
            kind: Name of the table.
            tables: Both runs' entries.
            names: Tensors, in order.
            cost: Error that rounding explains in all of them.
            explained: Larger error that is explained in one tensor.
            factor: Factor of the second run's tensors.
            flows: True if an allowed error of a tensor explains errors of later ones.
        """
        a, b = tables
        names = [name for name in names if _comparable(a.get(name), b.get(name))]
        largest = max((_rms(a[name]) for name in names), default=0.0)
        found: Errors = {}
        for name in names:
            error = _difference(a[name], b[name], factor, self.noise * largest * math.sqrt(a[name].numel))
            self.is_equal = self.is_equal and a[name] == b[name]
            key = kind, in_any_layer(name)
            own = (explained or {}).get(name, 0.0)
            allowed = ALLOWANCE * max(cost, self.history.get(key, 0.0), own)
            found[name] = Measured(error, error / allowed, a[name].numel == 1)
            if found[name].ok:
                self.seen[key] = max(error, self.seen.get(key, 0.0))
                # An error from a module's own weights alone may end there, as that of keys' biases in the softmax.
                cost = max(cost, error) if flows and own < error <= ALLOWANCE * cost else cost
                if error > self.worst[0] and kind in WORDS:
                    self.worst = error, WORDS[kind], name
        return found, cost

    def summary(self) -> str:
        """Describe two runs without a difference beyond rounding."""
        if self.is_equal:
            return "equal bit for bit"
        error, table, name = self.worst
        (first, start), (last, end) = self.drift[0], self.drift[-1]
        return (
            f"no difference that rounding does not explain. Rounding: at most {error:.2g} ({table} {quoted(name)}); "
            f"one operation costs {self.base:.2g}; the weights are {start:.2g} apart before step {first} and {end:.2g} "
            f"before step {last}"
        )


WORDS = {
    "weights": "weight",
    "outputs": "output of",
    "gradients": "gradient at the output of",
    "grads": "gradient of",
}


def _where(names: Sequence[str], outputs: Errors, gradients: Errors, grads: Errors, wrong: Sequence[str]) -> Where:
    modules = dict.fromkeys(map(_module, names))
    return judge([Row(m, _worst(m, outputs), _worst(m, gradients)) for m in modules], [*grads], wrong, {}, {})


def _backward(where: Where, wrong: Sequence[str], grads: Errors) -> tuple[str, str]:
    """Return the module whose backward differs, and a line that describes it."""
    row = next((row for row in where.rows if row.module == where.backward), None)
    if row is None or all(found.ok for found in row.gradients.values()):
        own = [name for name in wrong if row is not None and _owner(name) == row.module] or [wrong[-1]]
        start = "the gradient of" if row is None else f"right at the output of {quoted(row.module)}, and"
        return _owner(own[0]), f"{start} {', '.join(map(quoted, own))} differs, {_size(grads[own[0]])}"
    later = where.rows[where.rows.index(row) + 1 :]
    after = next((r for r in later if r.gradients and all(found.ok for found in r.gradients.values())), None)
    size = _size(row.gradients[0])
    if after is None:
        return row.module, f"differs from the loss on, first at the output of {quoted(row.module)}, {size}"
    line = f"right at the output of {quoted(after.module)} and different at that of {quoted(row.module)}, {size}"
    return after.module, f"{line}: the backward of {quoted(after.module)} differs"


def _other_data(a: Table, b: Table, bound: float) -> str:
    """Describe data that differ; '' if they are equal, or nothing can be compared.

    Layouts and frameworks may pass a batch by other arguments. Then one equal argument is enough.
    """

    def is_equal(x: Entry, y: Entry) -> bool:
        return x[:2] == y[:2] and (x == y if x.width == -1 else _difference(x, y) <= bound)

    other = [name for name in a if name in b and not is_equal(a[name], b[name])]
    if not other or (a.keys() != b.keys() and any(is_equal(x, y) for x in a.values() for y in b.values())):
        return ""
    x, y = a[other[0]], b[other[0]]
    sizes = f" ({x.numel} and {y.numel} numbers)" if x.numel != y.numel else ""
    return f"argument {other[0]!r} of the model differs{sizes}: the runs were given other batches"


def _from_own_weights(outputs: Table, a: Table, b: Table) -> dict[str, float]:
    """Return the error of each module's output that its own weights explain.

    Adam moves a weight of which the loss does not depend by rounding alone, such as the bias of attention's keys.
    """
    found: dict[str, float] = {}
    for name in a:
        output = outputs.get(_owner(name))
        if output is None or not output.width or not _comparable(a[name], b.get(name)):
            continue
        error = _difference(a[name], b[name])
        if a[name].numel == output.width and (size := _size_of(output)):  # a bias is added to every row
            error = max(error, output.numel / output.width * error * max(_norm(a[name]), _norm(b[name])) / size)
        found[_owner(name)] = max(error, found.get(_owner(name), 0.0))
    return found


def _factor(a: Table, b: Table, names: Sequence[str]) -> float:
    """Return the factor of the second run's gradients at outputs, from the one closest to the loss.

    Ranks and microbatches take means over their own parts, which are divided by later. A wrong factor shows in the
    parameters' gradients, which are compared without one.
    """
    pairs = ((_norm(a[name]), _norm(b[name])) for name in reversed(names) if _comparable(a.get(name), b.get(name)))
    factor = next((second / first for first, second in pairs if first > 0 and second > 0), 1.0)
    return factor if math.isfinite(factor) else 1.0


# --- two entries ------------------------------------------------------------------------------------------------------


def _comparable(a: Entry | None, b: Entry | None) -> bool:
    """Return True if both are sketches of one tensor, in equal parts."""
    return a is not None and b is not None and a.numel == b.numel and a.width == b.width >= 0


def _difference(a: Entry, b: Entry, factor: float = 1.0, floor: float = 0.0) -> float:
    """Estimate the norm of the difference of two tensors relative to their norm, or to ``floor`` if that is larger."""
    x, y = a.numbers, b.numbers
    if x == y and factor == 1.0:
        return 0.0
    if not all(map(math.isfinite, (*x, *y))):
        return 0.0 if not (math.isfinite(x[0]) or math.isfinite(y[0])) else math.nan

    def apart(part: slice, factor: float) -> float:
        return _root_mean_square([right / factor - left for left, right in zip(x[part], y[part], strict=True)])

    size = max(_size_of(a), _size_of(b) / factor, floor)
    if not size:
        return 0.0
    squares = apart(slice(0, 1), factor**2)
    if a.width > 0 and x[ROWS] and y[ROWS]:
        squares = max(squares, apart(ROWS, factor**2))
    return max(apart(LINEAR, factor), squares / (2 * size)) / size


def _distance(a: Table, b: Table) -> float:
    """Return the distance of all weights that both runs have, relative to their norm."""
    names = [name for name in a if _comparable(a[name], b.get(name))]
    apart = math.hypot(*(_difference(a[name], b[name]) * _norm(a[name]) for name in names))
    return apart / (math.hypot(*(_norm(a[name]) for name in names)) or 1.0)


def _minus(a: Entry, b: Entry) -> Entry:
    """Return the sketch of the difference; its norm is estimated."""
    apart = tuple(x - y for x, y in zip(a.numbers[LINEAR], b.numbers[LINEAR], strict=True))
    return a._replace(digest=0, numbers=(_root_mean_square(apart) ** 2, *apart))


def _norm(entry: Entry) -> float:
    return math.sqrt(max(entry.numbers[0], 0.0))


def _size_of(entry: Entry) -> float:
    """Return the norm, or the size of the projections if that is larger: rows may be alike, and a sketch adds them."""
    return max(_norm(entry), _root_mean_square(entry.numbers[LINEAR]))


def _rms(entry: Entry) -> float:
    return _norm(entry) / math.sqrt(max(entry.numel, 1))


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _module(name: str) -> str:
    return name.partition("[")[0]


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _worst(module: str, errors: Errors) -> dict[int, Measured]:
    """Return the worst comparison of a module's tensors, as judge expects it: by rank."""
    found = [measured for name, measured in errors.items() if _module(name) == module]
    return {0: max(found, key=lambda each: (math.isnan(each.share), each.share))} if found else {}


def _size(found: Measured) -> str:
    return f"relative difference {found.error:.2g} (rounding explains {found.error / found.share:.2g})"

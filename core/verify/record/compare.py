"""`python -m core compare RUN RUN ...`: find the first difference between recorded runs of one model.

Two runs of one model never agree bit for bit in two layouts or dtypes. A difference counts if rounding does not explain
it: if it is more than ALLOWANCE times the largest of the dtype's rounding error, the error that has reached the tensor
from the weights and from modules before it, and the error of the same tensor in earlier steps.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from core.verify.place import ALLOWANCE, Measured, Row, Where, in_any_layer, judge, quoted
from core.verify.record.differences import (
    common_ratio,
    comparable,
    difference,
    distance,
    from_own_weights,
    norm,
    projected,
    rms,
    root_mean_square,
)
from core.verify.record.file import TABLES, Entry, RecordedRun, RecordedStep, ranges, read_recording
from core.verify.report import wrong_by_layer

Errors = dict[str, Measured]

HALF = 2.0**-11  # smallest rounding unit of a 16-bit dtype
# Rounding error of one module in units, with and without 16 bits. 16-bit products are accumulated in fp32.
UNITS = {True: 2.0, False: 16.0}
NOISE = {True: 1e-2, False: 1e-3}  # a tensor smaller than this share of the largest one is round-off (check_gradients)
SAME_RATE = 1e-6  # relative


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
        names: Regular expression -> replacement, applied to the second recording's names by `re.sub`.

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
    a, b = one.steps[common[0]], two.steps[common[0]]
    if not a.grads.keys() & b.grads.keys():
        shown = [", ".join([*step.grads][:3]) or "none" for step in (a, b)]
        raise ValueError(
            f"the recordings have no parameter in common: {shown[0]}, ... and {shown[1]}, ...; map the names of the "
            "second one by --names REGEX=NEW"
        )
    title = f"{one.name} ({one.layout}) and {two.name} ({two.layout})"
    alone = []
    for run, other, mine, theirs in ((one, two, a.grads, b.grads), (two, one, b.grads, a.grads)):
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
        tables: dict[str, Any] = {
            table: {re.sub(pattern, new, name): entry for name, entry in getattr(step, table).items()}
            for table in TABLES
            if table != "data"
        }
    except (re.error, IndexError) as error:
        raise ValueError(f"--names {pattern}={new} is no regular expression with its replacement: {error}") from None
    return replace(step, **tables)


class _Steps:
    """Comparison of one step after the other, with the errors that earlier steps had."""

    def __init__(self, one: RecordedRun, two: RecordedRun) -> None:
        self.runs = one, two
        self.history: dict[tuple[str, str], float] = {}  # table and name in any layer -> largest error so far
        self.last: tuple[int, Mapping[str, Entry], Mapping[str, Entry]] | None = None  # last step, weights after it
        self.is_equal = True  # bit for bit
        self.worst = (0.0, "", "")  # share of what is allowed, in words, error
        self.drift: list[tuple[int, float]] = []  # step, distance of the weights before it
        self.base = 0.0
        self.flowed = 0.0  # error that the last comparisons explain in tensors after them

    def compare(self, number: int) -> Comparison | None:
        """Compare a step; None without a difference beyond rounding."""
        one, two = (run.steps[number] for run in self.runs)
        is_half = max(one.eps, two.eps) >= HALF
        self.base, self.noise = UNITS[is_half] * max(one.eps, two.eps), NOISE[is_half]
        self.seen: dict[tuple[str, str], float] = {}
        weights = [
            step.before or self._weights_after(run, number - 1) for run, step in zip(self.runs, (one, two), strict=True)
        ]
        data = _other_data(one.data, two.data, ALLOWANCE * self.base)
        if data:
            return Comparison(number, "data", lines=(f"step {number}, data: {data}",))
        found = self._weights(number, weights[0], weights[1], one, two)
        if found is None:
            self.drift.append((number, distance(weights[0], weights[1])))
            found = self._modules(number, one, two, (weights[0], weights[1])) or self._updates(
                f"step {number}, update", "update", (weights[0], one.after), (weights[1], two.after), one, two
            )
        self.last = number, one.after, two.after
        self.history |= {key: max(error, self.history.get(key, 0.0)) for key, error in self.seen.items()}
        return found

    @staticmethod
    def _weights_after(run: RecordedRun, number: int) -> Mapping[str, Entry]:
        return run.steps[number].after if number in run.steps else {}

    def _weights(
        self, number: int, a: Mapping[str, Entry], b: Mapping[str, Entry], one: RecordedStep, two: RecordedStep
    ) -> Comparison | None:
        """Compare the weights before a step: at the first one all of them, later their change since the last one."""
        if self.last is None:
            errors = self._measure("weights", a, b, [*a], self.base)
            wrong = [name for name, found in errors.items() if not found.ok]
            if not wrong:
                return None
            line = (
                f"step {number}, weights: {len(wrong)} of {len(errors)} parameters differ before the step, first "
                f"{quoted(wrong[0])}, {_size(errors[wrong[0]])}: another seed, or another checkpoint?"
            )
            return Comparison(number, "weights", wrong[0], (line,))
        last, *after = self.last
        if last == number - 1:
            return None
        title = f"weights: they differ before step {number}, and after step {last} they did not; record every step"
        return self._updates(title, "weights", (after[0], a), (after[1], b), one, two, gap=number - last)

    def _modules(
        self,
        number: int,
        one: RecordedStep,
        two: RecordedStep,
        weights: tuple[Mapping[str, Entry], Mapping[str, Entry]],
    ) -> Comparison | None:
        names = [name for name in one.outputs if name in two.outputs]
        cost = max(self.base, self.drift[-1][1])
        own = from_own_weights(one.outputs, *weights)
        outputs = self._measure("outputs", one.outputs, two.outputs, names, cost, flows=True, own=own)
        cost = self.flowed
        factor = self._factor(one.gradients, two.gradients, names)
        gradients = self._measure(
            "gradients", one.gradients, two.gradients, names[::-1], cost, factor=factor, flows=True
        )
        own = {name: found.error for name, found in gradients.items() if found.ok}
        grads = self._measure("grads", one.grads, two.grads, [*one.grads], cost, own=own)
        wrong = [name for name, found in grads.items() if not found.ok]
        modules = list(dict.fromkeys(_module(name) for name in names))
        rows = [Row(module, _of(module, outputs), _of(module, gradients)) for module in modules]
        where = judge(rows, [*grads], wrong, {}, {})
        if where.forward is not None:
            line = f"the output of {quoted(where.forward)} differs, {_size(_of(where.forward, outputs)[0])}"
            before = next((row for row in rows[: modules.index(where.forward)][::-1] if row.outputs), None)
            line += f"; right before it: {'nothing' if before is None else quoted(before.module)}"
            return Comparison(number, "output", where.forward, (f"step {number}, output: {line}",), where)
        if where.backward is None and not wrong:
            return None
        ratio = common_ratio(one.grads, two.grads, wrong)
        if len(wrong) == len(grads) and ratio is not None and where.backward is not None and not _any_wrong(gradients):
            line = f"every gradient is {ratio:.6g} times the first run's: the loss is weighted, or divided, differently"
            return Comparison(number, "gradient", "", (f"step {number}, gradient: {line}",), where)
        module, line = _backward(rows, where, wrong, {**grads, **gradients})
        lines = [f"step {number}, gradient: {line}"]
        return Comparison(
            number, "gradient", module, (*lines, *([wrong_by_layer([*grads], wrong)] * bool(wrong))), where
        )

    def _updates(
        self,
        title: str,
        kind: str,
        a: tuple[Mapping[str, Entry], Mapping[str, Entry]],
        b: tuple[Mapping[str, Entry], Mapping[str, Entry]],
        one: RecordedStep,
        two: RecordedStep,
        *,
        gap: int = 1,
    ) -> Comparison | None:
        """Compare the changes from the first to the second table of weights.

        Adam divides a gradient by its size, so the sign of a tiny element decides a full step. An error e of a gradient
        may cost sqrt(e) of the update, and a tiny element its complete update. Parameters whose gradient is round-off
        are left out.
        """
        rates = [sorted(set(step.rates)) for step in (one, two)]
        other = len(rates[0]) != len(rates[1]) or any(
            abs(x - y) > SAME_RATE * max(abs(x), abs(y)) for x, y in zip(*rates, strict=True)
        )
        largest = max((rms(entry) for entry in one.grads.values()), default=0.0)
        wrong: dict[str, float] = {}
        count = 0
        for name, grad in one.grads.items():
            tables = (*a, *b)
            if rms(grad) <= self.noise * largest or any(name not in table for table in (*tables, two.grads)):
                continue
            moves = [
                [y - x for x, y in zip(projected(table[0][name]), projected(table[1][name]), strict=True)]
                for table in (a, b)
            ]
            count += 1
            size = max(map(root_mean_square, moves))
            error = root_mean_square([x - y for x, y in zip(*moves, strict=True)])
            weight = max(norm(table[name]) for table in tables)
            key = kind, in_any_layer(name)
            cost = max(self.base, self.seen.get(("grads", in_any_layer(name)), 0.0))
            tiny = 2 * math.sqrt(max(grad.numbers[-1], two.grads[name].numbers[-1]) / grad.numel)
            share = max((math.sqrt(ALLOWANCE * cost) + tiny) * gap, ALLOWANCE * self.history.get(key, 0.0))
            if not error <= share * size + ALLOWANCE * self.base * weight:
                wrong[name] = root_mean_square(moves[1]) / (root_mean_square(moves[0]) or math.nan)
            elif size:
                self.seen[key] = max(error / size, self.seen.get(key, 0.0))
        if not wrong and not (other and kind == "update"):
            return None
        name = next(iter(wrong), "")
        line = f"{title}: the learning rates are {rates[0]} and {rates[1]}" if other else title
        if wrong:
            line += (
                f"{'; ' if other else ': '}the gradients agree, and the updates of {len(wrong)} of {count} parameters "
                f"differ, first {quoted(name)}, which moves {wrong[name]:.6g} times as far in the second run"
            )
        return Comparison(max(one.step, two.step), kind, name, (line,))

    def _factor(self, a: Mapping[str, Entry], b: Mapping[str, Entry], names: Sequence[str]) -> float:
        """Return the factor of the second run's gradients at outputs, from the one closest to the loss.

        Ranks and microbatches take means over their own parts, which are divided by later. A wrong factor shows in the
        parameters' gradients, which are compared without one.
        """
        for name in reversed(names):
            if comparable(a.get(name), b.get(name)) and a[name].numbers[0] > 0 and b[name].numbers[0] > 0:
                factor = math.sqrt(b[name].numbers[0] / a[name].numbers[0])
                if not math.isfinite(factor):
                    return 1.0
                near = max(1, round(factor)) if factor >= 1 else 1 / max(1, round(1 / factor))
                return near if abs(factor / near - 1) <= ALLOWANCE * self.base else factor
        return 1.0

    def _measure(
        self,
        table: str,
        a: Mapping[str, Entry],
        b: Mapping[str, Entry],
        names: Sequence[str],
        cost: float,
        *,
        factor: float = 1.0,
        flows: bool = False,
        own: Mapping[str, float] | None = None,
    ) -> Errors:
        """Compare tensors that both runs have, in this order.

        Args:
            table: Name of the table.
            a: The first run's.
            b: The second run's.
            names: Tensors, in order.
            cost: Error that rounding explains in all of them.
            factor: Factor of the second run's tensors.
            flows: True if an allowed error of a tensor explains errors of later ones.
            own: Error by module that its own weights explain, or for a weight the gradient at its module's output.

        Returns:
            The comparisons by name.
        """
        names = [name for name in names if comparable(a.get(name), b.get(name))]
        largest = max((rms(a[name]) for name in names), default=0.0)
        found: Errors = {}
        for name in names:
            floor = self.noise * largest * math.sqrt(a[name].numel)
            error = difference(a[name], b[name], factor, floor)
            self.is_equal = self.is_equal and a[name].digest == b[name].digest
            key = table, in_any_layer(name)
            explained = (own or {}).get(name.rpartition(".")[0] if table == "grads" else _module(name), 0.0)
            allowed = ALLOWANCE * max(cost, self.history.get(key, 0.0), explained)
            found[name] = Measured(error, error / allowed, a[name].numel == 1)
            if found[name].ok:
                self.seen[key] = max(error, self.seen.get(key, 0.0))
                # An error from a module's own weights alone may end there, as that of keys' biases in the softmax.
                cost = max(cost, error) if flows and explained < error <= ALLOWANCE * cost else cost
                if error > self.worst[0]:
                    self.worst = error, WORDS[table], name
        self.flowed = cost
        return found

    def summary(self) -> str:
        """Describe two runs without a difference beyond rounding."""
        if self.is_equal:
            return "equal bit for bit"
        error, what, name = self.worst
        said = (
            f"no difference that rounding does not explain. Rounding: at most {error:.2g} ({what} {quoted(name)}); one "
            f"operation costs {self.base:.2g}"
        )
        (first, start), (last, end) = self.drift[0], self.drift[-1]
        return said + f"; the weights are {start:.2g} apart before step {first} and {end:.2g} before step {last}"


WORDS = {
    "weights": "weight",
    "outputs": "output of",
    "gradients": "gradient at the output of",
    "grads": "gradient of",
}


def _backward(rows: Sequence[Row], where: Where, wrong: Sequence[str], errors: Errors) -> tuple[str, str]:
    """Return the module whose backward differs, and a line that describes it."""
    place = next((n for n, row in enumerate(rows) if row.module == where.backward), None)
    if place is None:
        return wrong[-1].rpartition(".")[0], f"the gradient of {quoted(wrong[-1])} differs, {_size(errors[wrong[-1]])}"
    row = rows[place]
    if all(found.ok for found in row.gradients.values()):
        own = [name for name in wrong if name.rpartition(".")[0] == row.module]
        line = f"right at the output of {quoted(row.module)}, and {', '.join(map(quoted, own))} differs"
        return row.module, f"{line}, {_size(errors[own[0]])}"
    after = next(
        (r for r in rows[place + 1 :] if r.gradients and all(found.ok for found in r.gradients.values())), None
    )
    size = _size(next(found for found in row.gradients.values() if not found.ok))
    if after is None:
        return row.module, f"differs from the loss on, first at the output of {quoted(row.module)}, {size}"
    line = f"right at the output of {quoted(after.module)} and different at that of {quoted(row.module)}, {size}"
    return after.module, f"{line}: the backward of {quoted(after.module)} differs"


def _other_data(a: Mapping[str, Entry], b: Mapping[str, Entry], bound: float) -> str:
    """Describe data that differ; '' if they are equal, or nothing can be compared.

    Layouts and frameworks may pass a batch by other arguments. Then one equal argument is enough.
    """
    pairs = [(name, a[name], b[name]) for name in a if name in b]
    other = [
        name
        for name, x, y in pairs
        if x.numel != y.numel or (x.digest != y.digest and (x.width < 0 or not difference(x, y, 1.0, 0.0) <= bound))
    ]
    if not other or (a.keys() != b.keys() and {x.digest for x in a.values()} & {y.digest for y in b.values()}):
        return ""
    x, y = a[other[0]], b[other[0]]
    sizes = f" ({x.numel} and {y.numel} numbers)" if x.numel != y.numel else ""
    return f"argument {other[0]!r} of the model differs{sizes}: the runs were given other batches"


def _module(name: str) -> str:
    return name.partition("[")[0]


def _of(module: str, errors: Errors) -> dict[int, Measured]:
    """Return the worst comparison of a module's tensors, as judge expects it: by rank."""
    found = [measured for name, measured in errors.items() if _module(name) == module]
    return {0: max(found, key=lambda each: (math.isnan(each.share), each.share))} if found else {}


def _any_wrong(errors: Errors) -> bool:
    return not all(found.ok for found in errors.values())


def _size(found: Measured) -> str:
    return f"relative difference {found.error:.2g} (rounding explains {found.error / found.share:.2g})"

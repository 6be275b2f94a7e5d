"""The file of a recorded run: JSON lines, first a header and then one line a step."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FILE_NAME = "record.jsonl"  # in the directory of a run
VERSION = 2
# Arguments of the model; outputs by module, in the order of forward, and gradients there; weights before the step (in
# the file only if the step before it is not recorded); gradients of the parameters; weights after the step.
TABLES = ("data", "outputs", "gradients", "before", "grads", "after")


class Entry(NamedTuple):
    """Numbers of one or more sketches; in a file those of a full tensor, over all ranks and microbatches.

    See core.verify.record.sketches. ``width`` is -2 if sketches differ in it.
    """

    numel: int
    width: int
    digest: int
    numbers: tuple[float, ...]


def added(entries: Collection[Entry]) -> Entry:
    """Return the entry of all parts."""
    numels, widths, digests, numbers = zip(*entries, strict=True)
    width = widths[0] if len(set(widths)) == 1 else -2
    sums = tuple(map(sum, zip(*numbers, strict=False)))
    return Entry(sum(numels), width, sum(digests) % 2**64, sums)


@dataclass(frozen=True)
class RecordedStep:
    """One step.

    Attributes:
        step: Number of the step, from 1.
        eps: Rounding unit of the coarsest dtype that the step computed in.
        rates: Learning rates of the optimizer's groups.
        tables: Entries by name, for each of TABLES. A line has the numbers as fp64 in base64, which is exact and fast.
    """

    step: int
    eps: float
    rates: tuple[float, ...]
    tables: dict[str, dict[str, Entry]]

    def line(self) -> str:
        """Return the step as a line of the file."""
        tables = {
            table: {name: [*row[:3], base64.b64encode(array("d", row.numbers)).decode()] for name, row in rows.items()}
            for table, rows in self.tables.items()
            if rows
        }
        return json.dumps({"step": self.step, "eps": self.eps, "rates": self.rates, **tables}, separators=(",", ":"))


@dataclass(frozen=True)
class RecordedRun:
    """A recording, read from its file.

    Attributes:
        name: The path as the user gave it.
        layout: Ranks and sizes of the parallel axes, in words.
        steps: The steps by number.
    """

    name: str
    layout: str
    steps: Mapping[int, RecordedStep]


def header(layout: str) -> str:
    """Return the first line of a file."""
    return json.dumps({"recording": VERSION, "layout": layout})


def read_recording(path: Path) -> RecordedRun:
    """Read a recording.

    If a resumed run has written a step again, its last line counts. A line that a crash cut off is left out.

    Raises:
        ValueError: If there is no recording, or a line cannot be read.
    """
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist (from {Path.cwd()}); record a run with --record, or with record_with")
    lines = file.read_text(errors="replace").splitlines()
    steps: dict[int, RecordedStep] = {}
    layout = ""
    for number, text in enumerate(lines, start=1):
        if not text:
            continue
        try:
            read = json.loads(text)
            if "recording" not in read:
                steps[int(read["step"])] = _step(read)
            elif read["recording"] == VERSION:
                layout = str(read["layout"])
            else:
                raise ValueError(f"version {read['recording']} is not {VERSION}")
        except (ValueError, TypeError, KeyError) as error:
            is_cut = number > 1 and (number == len(lines) or lines[number].startswith('{"recording"'))
            if not is_cut:  # otherwise the run ended while it wrote this line
                raise ValueError(f"{file}, line {number} is no line of a recording ({error}): {text[:60]!r}") from error
    if not steps:
        raise ValueError(f"{file} has no step; a step is written when the optimizer has made it")
    for number, step in steps.items():
        if number - 1 in steps and not step.tables["before"]:
            step.tables["before"] = steps[number - 1].tables["after"]
    return RecordedRun(str(path), layout, dict(sorted(steps.items())))


def _step(read: dict[str, Any]) -> RecordedStep:
    tables = {
        table: {
            name: Entry(numel, width, digest, tuple(array("d", base64.b64decode(numbers))))
            for name, (numel, width, digest, numbers) in read.get(table, {}).items()
        }
        for table in TABLES
    }
    return RecordedStep(int(read["step"]), float(read["eps"]), tuple(read["rates"]), tables)


def ranges(steps: Collection[int]) -> str:
    """Describe step numbers: 'steps 1 to 3, 7', or 'step 7'."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(" to ".join(map(str, part)) for part in parts)

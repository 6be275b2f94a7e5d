"""The file of a recorded run: JSON lines, first a header and then one line a step."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FILE_NAME = "record.jsonl"  # in the directory of a run
VERSION = 1


class Entry(NamedTuple):
    """Sketch of one full tensor; see core.verify.record.sketches.

    Attributes:
        numel: Number of elements, over all ranks and microbatches.
        width: As in core.verify.record.sketches.Sketch.
        digest: Sum of the bits.
        numbers: The sums.
    """

    numel: int
    width: int
    digest: int
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class RecordedStep:
    """One step.

    Attributes:
        step: Number of the step, from 1.
        eps: Rounding unit of the coarsest dtype that the step computed in.
        rates: Learning rates of the optimizer's groups.
        data: Arguments of the model.
        outputs: Outputs by module, in the order of forward.
        gradients: Gradients at these outputs.
        before: Weights before the step; empty if the step before it is recorded.
        grads: Reduced gradients of the parameters.
        after: Weights after the step.
    """

    step: int
    eps: float
    rates: tuple[float, ...] = ()
    data: Mapping[str, Entry] = field(default_factory=dict)
    outputs: Mapping[str, Entry] = field(default_factory=dict)
    gradients: Mapping[str, Entry] = field(default_factory=dict)
    before: Mapping[str, Entry] = field(default_factory=dict)
    grads: Mapping[str, Entry] = field(default_factory=dict)
    after: Mapping[str, Entry] = field(default_factory=dict)

    def line(self) -> str:
        """Return the step as a line of the file."""
        parts = [f'"step":{self.step},"eps":{self.eps!r},"rates":{json.dumps(self.rates)}']
        for name in TABLES:
            if table := getattr(self, name):
                rows = ",".join(f"{json.dumps(key)}:{_row(entry)}" for key, entry in table.items())
                parts.append(f'"{name}":{{{rows}}}')
        return f"{{{','.join(parts)}}}"


def _row(entry: Entry) -> str:
    numbers = ",".join([f"{number:.9g}" for number in entry.numbers])
    if "n" in numbers:
        numbers = numbers.replace("nan", "NaN").replace("inf", "Infinity")
    return f"[{entry.numel},{entry.width},{entry.digest},{numbers}]"


TABLES = ("data", "outputs", "gradients", "before", "grads", "after")


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

    Args:
        path: The file, or the directory of a run.

    Returns:
        The recording.

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
            if "recording" in read:
                if read["recording"] != VERSION:
                    raise ValueError(f"version {read['recording']} is not {VERSION}")
                layout = str(read["layout"])
                continue
            step = _step(read)
        except (ValueError, TypeError, KeyError) as error:
            cut = number > 1 and (number == len(lines) or lines[number].startswith('{"recording"'))
            if cut:  # the run ended while it wrote this line
                continue
            raise ValueError(f"{file}, line {number} is no line of a recording ({error}): {text[:60]!r}") from error
        steps[step.step] = step
    if not steps:
        raise ValueError(f"{file} has no step; a step is written when the optimizer has made it")
    return RecordedRun(str(path), layout, dict(sorted(steps.items())))


def _step(read: dict[str, Any]) -> RecordedStep:
    tables = {
        name: {
            key: Entry(int(row[0]), int(row[1]), int(row[2]), tuple(map(float, row[3:]))) for key, row in rows.items()
        }
        for name in TABLES
        if (rows := read.get(name)) is not None
    }
    return RecordedStep(int(read["step"]), float(read["eps"]), tuple(read["rates"]), **tables)


def ranges(steps: Collection[int]) -> str:
    """Describe step numbers: 'steps 1 to 3, 7', or 'step 7'."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(" to ".join(map(str, part)) for part in parts)

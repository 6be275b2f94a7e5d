"""`python -m core compare runs/a runs/b ...`: compare the losses of runs of one model in several layouts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

TOLERANCE = 1e-4  # nats


def main(argv: Sequence[str] | None = None) -> int:
    """Print each run's largest difference of losses to the first run, by step number.

    Returns:
        1 if a difference is above TOLERANCE, 2 if a run cannot be read or lacks the first run's steps, else 0.
    """
    directories = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    asked = bool({"-h", "--help"} & set(map(str, directories)))
    if asked or len(directories) < 2:
        usage = "usage: python -m core compare runs/first runs/second ..."
        print(usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    differ = False
    try:
        first, *others = [read_losses(directory) for directory in directories]
        print(f"{directories[0]}: {len(first)} steps, loss {first[min(first)]:.6f} to {first[max(first)]:.6f}")
        for directory, losses in zip(directories[1:], others, strict=True):
            step, largest = largest_difference(first, losses)
            differ = differ or not largest <= TOLERANCE
            words = (
                f"{directory}: in {len(first.keys() & losses)} common steps at most {largest:.1e} away (step {step})"
            )
            for name, alone in ((directories[0], first.keys() - losses), (directory, losses.keys() - first)):
                words += f"; only {name} has {ranges(alone)}" if alone else ""
            print(words)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(differ)


def read_losses(run: Path) -> dict[int, float]:
    """Read the loss of every step of a run.

    A resumed run may have written a step twice: the last line counts, and the output says so.

    Returns:
        Loss by step number.

    Raises:
        ValueError: If there is none.
    """
    path = run / "steps.jsonl"
    if not path.is_file():
        found = "has no steps.jsonl" if run.is_dir() else "is no directory"
        raise ValueError(f"{run} {found} (from {Path.cwd()}); give directories of runs, such as runs/latest")
    losses: dict[int, float] = {}
    again: set[int] = set()
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = json.loads(text)
            step, loss = int(record["step"]), float(record["loss"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number} has no step and loss: {text[:60]!r}") from error
        if step in losses:
            again.add(step)
        losses[step] = loss
    if not losses:
        raise ValueError(f"{path} holds no step")
    if again:
        print(f"{run}: {ranges(again)} written again; the last line of a step counts")
    return losses


def largest_difference(first: Mapping[int, float], second: Mapping[int, float]) -> tuple[int, float]:
    """Return the step with the largest difference, and the difference. NaN counts as the largest."""
    differences = {step: abs(first[step] - second[step]) for step in sorted(first.keys() & second.keys())}
    if not differences:
        raise ValueError(f"the runs have no step in common: {ranges(first)} and {ranges(second)}")
    worst = max(differences, key=lambda step: (math.isnan(differences[step]), differences[step]))
    return worst, differences[worst]


def ranges(steps: Collection[int]) -> str:
    """'steps 1 to 3, 7', or 'step 7'."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(" to ".join(map(str, part)) for part in parts)

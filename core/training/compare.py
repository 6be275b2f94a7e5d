"""`python -m core.training.compare runs/a runs/b ...`: do runs of one model in several layouts have the same losses?"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

TOLERANCE = 1e-4  # nats


def main(argv: Sequence[str] | None = None) -> int:
    """Print the largest difference of each run's losses to those of the first; 1 where one is above TOLERANCE."""
    directories = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    if len(directories) < 2:
        print("usage: python -m core.training.compare runs/first runs/second ...", file=sys.stderr)
        return 2
    try:
        first, *others = [read_losses(directory) for directory in directories]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{directories[0]}: {len(first)} steps, loss {first[0]:.6f} to {first[-1]:.6f}")
    differ = False
    for directory, losses in zip(directories[1:], others, strict=True):
        common = min(len(first), len(losses))
        step, largest = largest_difference(first[:common], losses[:common])
        differ = differ or not largest <= TOLERANCE
        print(f"{directory}: in the first {common} steps at most {largest:.1e} away (step {step})")
    return int(differ)


def read_losses(run: Path) -> list[float]:
    """The loss of every step of a run; ValueError where there is none."""
    losses = [float(json.loads(line)["loss"]) for line in (run / "steps.jsonl").read_text().splitlines()]
    if not losses:
        raise ValueError(f"{run / 'steps.jsonl'} holds no step")
    return losses


def largest_difference(first: Sequence[float], second: Sequence[float]) -> tuple[int, float]:
    """(step, counted from 1; difference) where the two are farthest apart; one that is no number is the farthest."""
    differences = [abs(one - other) for one, other in zip(first, second, strict=True)]
    worst = max(
        range(len(differences)), key=lambda i: float("inf") if differences[i] != differences[i] else differences[i]
    )
    return worst + 1, differences[worst]


if __name__ == "__main__":
    sys.exit(main())

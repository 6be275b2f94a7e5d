"""`python -m core.verify train.py ARGUMENTS`: compare the first step of a program with one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from core.verify.asked import asked_by
from core.verify.program import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, check it, and return the exit status."""
    return run_program(asked_by(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())

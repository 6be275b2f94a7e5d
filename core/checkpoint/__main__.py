"""``python -m core inspect`` and ``python -m core.checkpoint verify``: inspect checkpoints, or verify every byte.

No ranks are started and no model is built. A damaged checkpoint is shown as far as it can be trusted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from core.checkpoint.errors import CheckpointError
from core.checkpoint.inspection import inspect, verify

INTACT, DAMAGED, USAGE_ERROR, NOT_READ = 0, 1, 2, 141  # 141: as a shell names a closed pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the chosen command, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m core.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="inspect|verify")

    looking = commands.add_parser(
        "inspect", prog="python -m core inspect", help="print steps, layout, tensors and sizes"
    )
    _add_place(looking)
    looking.add_argument("--files", action="store_true", help="also print the files and what is in them")
    looking.set_defaults(run=lambda options: inspect(options.place, options.step, _print, with_files=options.files))

    checking = commands.add_parser("verify", help="read every byte; exit status 1 if any is not as it was saved")
    _add_place(checking)
    checking.set_defaults(run=lambda options: verify(options.place, options.step, _print))

    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout at exit
        return NOT_READ
    except (CheckpointError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="DIRECTORY", help="the root of a run's checkpoints, or one step's directory")
    parser.add_argument("--step", type=int, help="this step of the root only")


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

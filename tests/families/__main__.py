"""`python -m tests.families check FAMILY --tp 2`: is a family right when it is split? `... families`: all of them.

A tiny random copy is made offline, split on processes of this machine, and compared with one process. Exit status 0:
nothing is wrong.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from core.hugging_face.read.directory import read_configuration
from core.hugging_face.run.sequence import MODES
from tests.families.check import check_families, table
from tests.families.tiny import all_families


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the command, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="one family")
    check.add_argument("family", help="model type (qwen3_moe), family/ConfigClass, or a directory with a config.json")
    check.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="values of the configuration")
    everything = commands.add_parser("families", help="every family with a plan, as a table")
    for command in (check, everything):
        command.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks (default: 2)")
        command.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
        command.add_argument("--ep", type=int, default=1, help="ranks that share the experts (default: 1)")
        command.add_argument("--sp", choices=MODES, help="sequence parallelism; the last two on 2 ranks of their own")
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in ("tp", "pp", "ep", "sp")}
    if options.command == "families":
        progress = functools.partial(print, file=sys.stderr, flush=True)
        verdicts = check_families(all_families(), report=progress, overrides={}, **sizes)
        print(table(verdicts, **sizes))
        return int(any(verdict.answer == "wrong" for verdict in verdicts))
    try:
        kinds, values = _chosen(options.family)
        values.update(_assignment(text) for text in options.set)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    verdicts = check_families(kinds, report=functools.partial(print, flush=True), overrides=values, **sizes)
    return int(any(verdict.answer in ("wrong", "not built") for verdict in verdicts))


def _chosen(text: str) -> tuple[dict[str, type], dict[str, Any]]:
    """Return the matching configuration classes, and the boolean values of a directory's configuration."""
    known = all_families()
    if os.path.isdir(text) or text.endswith(".json"):
        config = read_configuration(text)
        found = {name: kind for name, kind in known.items() if kind is type(config)}
        if not found:
            raise ValueError(f"{text}: {type(config).__name__} has no tensor-parallel plan and no policy")
        return found, {name: value for name, value in config.to_diff_dict().items() if isinstance(value, bool)}
    found = {n: k for n, k in known.items() if text in (n, n.split("/")[0], getattr(k, "model_type", ""))}
    if not found:
        close = ", ".join([name for name in known if text in name][:5])
        raise ValueError(f"no family with a plan is called {text!r}; near: {close or 'none'}")
    return found, {}


def _assignment(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if not value:
        raise ValueError(f"--set takes NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())

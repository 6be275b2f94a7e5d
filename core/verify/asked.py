"""Options of ``python -m core verify``, and the run of the program that they name."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMED = "module:function, or a function of the program"
DESCRIPTION = "Run a program, and compare the steps of the model that it trains with one process that splits nothing."


@dataclass(frozen=True)
class Asked:
    """Options of the command line.

    Attributes:
        program: File or module to run.
        arguments: Arguments of the program.
        is_module: True if ``program`` is a module.
        whole: 'module:function', or a function of the program, that builds the unsplit model.
        loss: The same for the mean loss of a microbatch.
        join: The same for joining the parts of context-parallel ranks.
        continues: True if the program continues training after the report.
        steps: Number of optimizer steps after which weights are compared too; None to compare gradients only.
        record: File for a recording of the program's steps; None to compare them with one process.
        every: Steps between two recorded ones.
    """

    program: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    whole: str | None = None
    loss: str | None = None
    join: str | None = None
    continues: bool = False
    steps: int | None = None
    record: str | None = None
    every: int = 1


def asked_by(arguments: Sequence[str]) -> Asked:
    """Parse the command line: options, then the program and its arguments."""
    parser = argparse.ArgumentParser(prog="python -m core verify", description=DESCRIPTION)
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module, as for python -m")
    parser.add_argument("--whole", metavar="FUNCTION", help=f"builds the model without any splitting; {NAMED}")
    parser.add_argument(
        "--loss", metavar="FUNCTION", help=f"the mean loss of a microbatch, of a model and inputs; {NAMED}"
    )
    parser.add_argument(
        "--join", metavar="FUNCTION", help=f"makes a whole sequence of context-parallel ranks' parts; {NAMED}"
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        metavar="N",
        help="compare N steps, and the weights after each; without it the gradients of two steps are compared",
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="run the program and record its steps for python -m core compare; check nothing",
    )
    parser.add_argument("--every", type=_positive, default=1, metavar="N", help="record each N-th step")
    parser.add_argument("--go-on", dest="continues", action="store_true", help="train on after the report")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    found = vars(parser.parse_args(arguments))
    return Asked(**{**found, "arguments": tuple(found["arguments"])})


def execute(asked: Asked) -> int:
    """Run the program in this process, as ``__main__``, and return its exit status; 2 if there is no such file."""
    if not asked.is_module and not Path(asked.program).is_file():
        print(f"python -m core verify: there is no file {asked.program!r}", file=sys.stderr)
        return 2
    sys.argv = [asked.program, *asked.arguments]
    try:
        if asked.is_module:
            runpy.run_module(asked.program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(asked.program).resolve().parent)
            runpy.run_path(asked.program, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)  # as the interpreter does
        return 1
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 at least, not {number}")
    return number


def function_named(name: str) -> Callable[..., Any]:
    """Find a function by 'module:function', or by its name in the running program.

    Raises:
        ValueError: If there is no such function.
    """
    module_name, _, function_name = name.rpartition(":")
    module = importlib.import_module(module_name) if module_name else sys.modules["__main__"]
    found = getattr(module, function_name, None)
    if not callable(found):
        raise ValueError(f"{name!r} names no function; {module_name or 'the program'} has no {function_name!r}")
    function: Callable[..., Any] = found
    return function

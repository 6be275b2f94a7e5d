"""A call in a process of its own, which is started for it and ends with it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Value = TypeVar("Value")

PR_SET_PDEATHSIG = 1
ENDING_S = 10.0  # for the interpreter to end after its answer


def in_new_process(function: Callable[..., Value], *arguments: Any) -> Value:
    """Call `function(*arguments)` in a new interpreter; RuntimeError, with its traceback, if it fails.

    function: of a module, not of a function. The process may start processes; they should end when it does.
    """
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        try:
            failed, value = mine.recv()
        except EOFError:
            process.join()
            failed, value = True, f"its process ended with exit code {process.exitcode}"
        process.join(ENDING_S)
    finally:
        process.kill()
        process.join()
        mine.close()
    if failed:
        raise RuntimeError(f"{function.__module__}.{function.__qualname__}, in a process of its own: {value}")
    return value


def die_with_parent() -> None:
    """Leave Ctrl-C, which reaches the whole terminal, to the parent, and end when it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it ended while this process was starting
        os._exit(1)


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    die_with_parent()
    try:
        answer = False, function(*arguments)
    except Exception:
        answer = True, traceback.format_exc()
    pipe.send(answer)

"""Location of the main thread, read from another thread: its wait, or the module, call and line that it runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from core.watch.waiting import call_of, current_wait, in_words, steps_of

COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
WAITS_IN = (*COLLECTIVES, "pipelining/schedules.py")  # the last one also runs the model, in inner frames


@dataclass(frozen=True)
class Place:
    """Location of a thread.

    Attributes:
        words: Description of the location.
        since: Monotonic seconds at which the thread arrived there.
        waits: True if the thread waits for other ranks.
        ranks: Ranks that it waits for, if known.
        key: The thread is still in this place while the key is unchanged.
        what: Subject of the wait, if known.
    """

    words: str
    since: float
    waits: bool = False
    ranks: tuple[int, ...] = ()
    key: tuple[float, ...] = ()
    what: str = ""


NOWHERE = Place("", 0.0)


def place_of_main_thread(before: Place) -> Place:
    """Return the main thread's current place, or ``before`` itself if that has not changed."""
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)
    wait = current_wait(main)
    if frame is None:
        return before
    if wait is not None and wait.computes and not frame.f_code.co_filename.endswith(WAITS_IN):
        wait = None
    steps = steps_of(vars(main))
    where = (id(frame), frame.f_lasti) if wait is None or wait.computes else (id(wait), wait.began)
    key = (*where, steps.number, steps.waited_s)
    if key == before.key:
        return before
    if wait is None:
        words, waits = place_in_code(frame)
        step = f", step {steps.number}" if steps.number else ""
        return Place(f"{words}{step}", time.monotonic(), waits, _partners(frame) if waits else (), key)
    try:
        ranks = wait.ranks
    except (KeyError, ValueError):  # the wait has just ended, and its group is destroyed
        return before
    words = f"waiting for {wait}{call_of(vars(main))}, {in_words(ranks)}"
    return Place(words, time.monotonic(), True, tuple(ranks), key, str(wait))


def group_of_main_thread() -> dist.ProcessGroup | None:
    """Return the group that the main thread waits for, if known."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for arguments in _arguments(frame):
        if isinstance(arguments.get("group"), dist.ProcessGroup):
            return arguments["group"]
    wait = current_wait(threading.main_thread())
    return wait.group if wait is not None and isinstance(wait.group, dist.ProcessGroup) else None


def _arguments(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Yield the arguments of the enclosing calls of torch.distributed, innermost first."""
    while frame is not None and frame.f_code.co_filename.endswith(COLLECTIVES):
        yield frame.f_locals
        frame = frame.f_back


def _partners(frame: FrameType) -> tuple[int, ...]:
    """Return the ranks that a call of torch.distributed waits for; () if its arguments do not determine them."""
    for arguments in _arguments(frame):
        if "tag" in arguments:  # a send or a receive
            peer = arguments.get("src", arguments.get("dst"))
            return (peer,) if isinstance(peer, int) else ()
        if "group" in arguments:
            with suppress(KeyError, ValueError):  # the group has been destroyed
                return tuple(dist.get_process_group_ranks(arguments["group"]))
            return ()
    return ()


def place_in_code(innermost: FrameType) -> tuple[str, bool]:
    """Describe the location of a frame; also return True if it is a wait of torch.distributed."""
    modules: list[nn.Module] = []
    backward, waits, where = False, False, ""
    frame: FrameType | None = innermost
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_call_impl" and isinstance(frame.f_locals.get("self"), nn.Module):
            modules.append(frame.f_locals["self"])
        waits = waits or code.co_filename.endswith(WAITS_IN if frame is innermost else COLLECTIVES)
        backward = backward or code.co_name == "_engine_run_backward"
        if not where and "torch" not in Path(code.co_filename).parts:
            where = f"{code.co_name} ({'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno})"
        frame = frame.f_back
    words = f"in {where}" if where else ""
    if modules:
        words = f"in forward of {_path(modules[::-1])}, {words}"
    elif backward:
        words = f"in backward, {words}"
    return words, waits


def _path(nested: list[nn.Module]) -> str:
    """Return the innermost module's name in the outermost one."""
    root, inner = nested[0], nested[-1]
    name = next((name for name, module in root.named_modules() if module is inner), "")
    return f"{type(root).__name__}.{name}" if name else type(inner).__name__

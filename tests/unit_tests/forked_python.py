"""A program of Python in a fork of a process that has torch imported: seconds cheaper than a new interpreter.

For programs whose imports and whose launcher are not what is tested. What the fork has of `core` was imported by its
server; nothing of it was used.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.unit_tests import ranks

ROOT = Path(__file__).parents[2]


def run_python(
    *arguments: str | Path, folder: Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, limit_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`; arguments: a file, or -m name.

    folder: for what is printed. env: None for this process's.
    """
    words = [str(argument) for argument in arguments]
    files = folder / "stdout.txt", folder / "stderr.txt"
    context: Any = ranks._the_pool().context
    process = context.Process(target=_become, args=(words, str(cwd), dict(os.environ if env is None else env), files))
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(words, limit_s, files[0].read_text(), files[1].read_text())
    return subprocess.CompletedProcess(words, process.exitcode, files[0].read_text(), files[1].read_text())


def _become(words: list[str], cwd: str, environment: dict[str, str], files: tuple[Path, Path]) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else list(words)
    sys.path[:0] = [cwd if is_module else str(Path(words[0]).resolve().parent), *added]
    status: object = 0
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does that ends, and so is the next line
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))

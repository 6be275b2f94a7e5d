"""Shared by all benchmarks: `--json FILE`, and the facts to read a figure with: date, machine, versions, command."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def add_json(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark take `--json FILE`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, with date and machine")


def circumstances(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Date, machine, versions, commit and command line of the benchmark `name` that was given `arguments`."""
    return {
        "command": " ".join(["python -m benchmarks", name, *arguments]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def write_json(path: Path | None, name: str, arguments: Sequence[str], results: Any) -> None:
    """Write the circumstances and `results` to `path`; without a path, nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"benchmark": name, **circumstances(name, arguments), "results": results}, indent=1) + "\n"
    )


def machine() -> str:
    """The processor, the cores that this process may use, and the GPU if there is one."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = [
            line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = named[0] if named else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{cores} cores of {model}, {gpu}"


def commit() -> str:
    """The commit that is measured, '+' after it where the working tree differs; '' outside a git repository."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return head + ("+" if head and _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""Packages that are compared with in the nightly run alone, each installed in a directory that the tests make."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

FOLDERS = Path(tempfile.gettempdir()) / f"gradient-core-peers-{os.getuid()}-py{sys.version_info.minor}"


def peer(*requirements: str, python: str = "") -> Path:
    """Return a directory with these packages, without their dependencies; skip if they cannot be installed.

    `python` is the version that the wheels are for, if it is not this interpreter's.

    The ranks of a test may ask at once: the first that has installed everything names the directory.
    """
    folder = FOLDERS / "+".join(requirements)
    if not folder.exists():
        FOLDERS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDERS) as made:
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", made, *requirements]
            command += ["--only-binary=:all:", "--ignore-requires-python", "--python-version", python] if python else []
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            if done.returncode:
                pytest.skip(f"{' '.join(requirements)} cannot be installed: {done.stderr.strip()[-200:]}")
            try:
                Path(made).rename(folder)
            except OSError:  # another rank was faster
                assert folder.exists()
            Path(made).mkdir(exist_ok=True)  # the context removes it
    return folder


def import_from(*requirements: str) -> None:
    """Let this process import the packages."""
    folder = str(peer(*requirements))
    if folder not in sys.path:
        sys.path.append(folder)

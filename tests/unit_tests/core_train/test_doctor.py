"""`python -m core doctor` tells what is there and what is missing, and never ends in a traceback."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools
import torch

import benchmarks.__main__ as benchmarks
from core import __main__ as command
from core.hugging_face.read.transformers_plans import VERSIONS
from core.verify.record import compare
from core_compat import check as compat
from core_train.commands import doctor

ROOT = Path(__file__).parents[3]


def lines_of(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """'verdict text' by name, of the lines between the first and the last."""
    _, *findings, _ = capsys.readouterr().out.splitlines()
    pattern = re.compile(rf"(\w+) +({'|'.join(map(re.escape, doctor.QUESTIONS))})  +(.*)")
    matches = [pattern.fullmatch(line) for line in findings]
    assert all(matches), findings
    return {match[2]: f"{match[1]} {match[3]}" for match in matches if match}


def test_the_command_answers_every_question_in_about_twenty_lines() -> None:
    run = [sys.executable, "-m", "core", "doctor"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == len(doctor.QUESTIONS) + 2 <= 24
    assert f"torch {torch.__version__}" in re.sub(" +", " ", done.stdout)
    assert "cannot be found" not in done.stdout
    assert lines[-1].startswith("Ready.")


def test_without_torch_every_line_is_printed_and_the_status_is_1(tmp_path: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; import core_train.commands.doctor as d; sys.exit(d.main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (1, "")
    assert len(done.stdout.splitlines()) == len(doctor.QUESTIONS) + 2
    assert re.search(r"^MISSING +torch +not installed: pip install torch$", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1].startswith("Mend first: torch")


def test_an_answer_that_fails_is_reported_in_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> doctor.Line:
        raise RuntimeError("the driver is asleep\nand more")

    monkeypatch.setitem(doctor.QUESTIONS, "GPUs", broken)
    assert doctor.main() == 0
    assert lines_of(capsys)["GPUs"] == "without cannot be found: the driver is asleep"


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.10.1", "MISSING"),
        ("2.11.0", "ok"),
        ("2.13.0+cu130", "ok"),
        ("2.14.0.dev2026", "without"),
        ("3.0", "without"),
    ],
)
def test_the_version_of_torch_is_held_against_those_that_are_supported(
    version: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.torch_version().verdict == verdict


def test_versions_and_extras_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    extras = runpy.run_path(str(ROOT / "setup.py"))["EXTRAS"]
    for name, packages in doctor.EXTRAS.items():
        assert list(packages) == [re.split("[<>=]", requirement)[0] for requirement in extras[name]]
    assert set(extras) - set(doctor.EXTRAS) == {"test", "check", "docs"}
    oldest, untried = (".".join(map(str, bound)) for bound in (doctor.OLDEST_TORCH, doctor.FIRST_UNTRIED_TORCH))
    assert f"torch>={oldest},<{untried}" in given["install_requires"]  # type: ignore[operator]
    oldest, untried = (".".join(map(str, bound)) for bound in VERSIONS)
    for name in ("transformers", "integrations"):
        assert f"transformers>={oldest},<{untried}" in extras[name]


def test_a_transformers_whose_plans_were_never_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    assert doctor.extra("transformers")().verdict == "ok"
    monkeypatch.setattr(importlib.metadata, "version", lambda package: {"transformers": "6.1.0"}[package])
    finding = doctor.extra("transformers")()
    assert finding.verdict == "without"
    assert "transformers 6.1.0: its parallel plans are read for versions from" in finding.text
    assert doctor.extra("safetensors")().verdict == "ok"


def raises(error: Exception) -> Callable[..., object]:
    def call(*_arguments: object, **_options: object) -> object:
        raise error

    return call


def test_what_makes_a_machine_slower_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    assert doctor.cores().verdict == "slower"
    monkeypatch.setattr(doctor, "HUGE_PAGES", tmp_path / "enabled")
    assert doctor.huge_pages().verdict == "slower"
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert doctor.huge_pages().verdict == "slower"
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert doctor.huge_pages().verdict == "ok"
    monkeypatch.setattr(socket, "gethostbyname", raises(OSError(-2, "Name or service not known")))
    assert "GLOO_SOCKET_IFNAME" in doctor.address().text
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    assert doctor.shared_memory().verdict == "slower"


def test_memory_that_another_process_may_not_open_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        assert doctor.shared_memory().verdict == "ok"
    refused = SimpleNamespace(returncode=1)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_arguments, **_options: refused)
    assert doctor.shared_memory().verdict == "slower"


def test_alike_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="Example 80", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _number: device)
    assert doctor.gpus() == doctor.Line("ok", "3 x Example 80, 80 GiB, compute 9.0; one rank each")


@pytest.mark.parametrize("word", ["-h", "--help"])
@pytest.mark.parametrize(
    "main",
    [
        command.main,
        doctor.main,
        compare.main,
        compat.main,
        benchmarks.main,
        lambda words: command.main(["doctor", *words]),
    ],
)
def test_help_is_printed_to_stdout_with_status_0(
    main: Callable[[list[str]], int], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: python -m ") and said.err == ""


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["dcotor"], 2), (["doctor", "-x"], 2)])
def test_other_words_are_answered_without_a_traceback(
    arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == status
    said = capsys.readouterr()
    assert "doctor" in (said.err if status else said.out)


def test_every_command_of_the_packages_is_named() -> None:
    is_main = '__name__ == "__main__"'
    files = [
        path
        for path in [*(ROOT / "core").rglob("*.py"), *ROOT.glob("core_*/**/*.py")]
        if path.name == "__main__.py" or is_main in path.read_text()
    ]
    places = [path.parent if path.name == "__main__.py" else path.with_suffix("") for path in files]
    commands = {".".join(place.relative_to(ROOT).parts) for place in places} - {"core"}
    assert commands == set(re.findall(r"python -m (core[\w.]+)", command.USAGE))


@pytest.mark.parametrize("word", command.WORDS)
def test_each_word_prints_its_usage(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        command.main([word, "--help"])
    assert f"usage: python -m core {word} " in f"{capsys.readouterr().out} ".replace("\n", " ")


def test_a_word_loads_its_package_only_when_it_is_typed() -> None:
    program = """
import sys
from core.__main__ import main
main(["--help"])
print("core_train" in sys.modules, "torch" in sys.modules)
main(["doctor", "--help"])
print("core_train" in sys.modules, "core_plan.command" in sys.modules, "core_compat" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "False False" in lines and lines[-1] == "True False False"

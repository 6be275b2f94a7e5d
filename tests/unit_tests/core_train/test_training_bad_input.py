"""What a careless user gives the main job: one line, before ranks start, status 2, and nothing is waited for.

Flags, files, places and variables. The ranges of numbers are in test_training_flags.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from core_plan.job.errors import ConfigError
from core_plan.machine.threads import intra_op_threads
from core_train.main import main
from core_train.output import Output

SECONDS = 20.0


@pytest.fixture()
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with files of all kinds."""
    monkeypatch.chdir(tmp_path)
    for name in [*os.environ]:
        if name.startswith("SLURM") or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("core_train.main.start_ranks", lambda _: 77)
    os.mkfifo("fifo")
    Path("directory").mkdir()
    Path("empty").touch()
    Path("huge").touch()
    os.truncate("huge", 16 << 30)
    Path("binary").write_bytes(b"\xff\xfe\0\1" * 100)
    Path("deep").write_text("[" * 100_000 + "]" * 100_000)
    Path("braces").write_text("{}")
    Path("deep.toml").write_text("a=" + "[" * 100_000 + "]" * 100_000)
    Path("digits.toml").write_text("[run]\nsteps=" + "9" * 5000)
    Path("nul.toml").write_bytes(b'[run]\nname="a\0b"\n')
    Path("section.toml").write_text("run=3\n")
    Path("date.toml").write_text("[run]\nname=1979-05-27\n")
    return tmp_path


FILES = ("fifo", "/dev/zero", "directory", "huge", "binary", "deep", "a\0b", "\udcff", "not there", "a/" * 3000)
PLACES = ("fifo", "empty", "/proc/x", "a\0b", "a/" * 3000)
CASES = [
    *((["--config", name], {}) for name in (*FILES, "deep.toml", "digits.toml", "nul.toml", "section.toml")),
    (["--config", "date.toml"], {}),
    (["--config"], {}),
    *((["--data.text", name], {}) for name in ("fifo", "/dev/zero", "directory", "empty", "a\0b", "not there")),
    *((["--data.tokenizer", name], {}) for name in (*FILES, "empty", "braces")),
    *(([flag, name], {}) for name in PLACES for flag in ("--run.directory", "--checkpoint.dir", "--data.cache")),
    *((["--run.name", name], {}) for name in ("a\nb", "a\0b", "\udcff", "a" * 300, "..", "a/b")),
    (["--run.steps", "9" * 5000], {}),
    (["positional"], {}),
    *(([], {"OMP_NUM_THREADS": value}) for value in ("x", "0", "-1", "9" * 5000)),
    ([], {"SLURM_CPUS_PER_TASK": "x"}),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("flags", "variables"), CASES, ids=[ascii(" ".join([*flags, *map("=".join, v.items())]))[:60] for flags, v in CASES]
)
def test_it_is_refused_in_one_line_before_ranks_start(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    variables: dict[str, str],
) -> None:
    if "--data.tokenizer" in flags:
        pytest.importorskip("tokenizers")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = sorted(here.iterdir())
    begun = time.monotonic()
    assert main(flags) == 2
    assert time.monotonic() - begun < SECONDS
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and len(said) < 8000
    assert main([*flags, "--dry-run"]) == 2, "a dry run makes every check of a start"
    assert capsys.readouterr().err == said
    assert sorted(here.iterdir()) == before, "nothing was left"


def test_what_is_right_starts(here: Path) -> None:
    assert main([]) == main(["--data.text", "binary", "--run.directory", "a/b"]) == 77


def test_a_read_only_place_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert main([]) == 2
    assert "no directory that this user may write to (Read-only file system)" in capsys.readouterr().err


def test_threads_are_a_number() -> None:
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS is 'many'"):
        intra_op_threads({"OMP_NUM_THREADS": "many"}, requested=None, cores=4, local_world_size=2)


def test_text_that_the_terminal_cannot_show_is_written_as_escapes(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as stream:
        Output(stream).write("caf\xe9 \udcff\n")
    assert (tmp_path / "log").read_bytes() == b"caf\\xe9 \\udcff\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_on_a_full_disk_warns_once_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as stream:
        output = Output(stream)
        for _ in range(3):
            output.write("a line\n" * 5000)
            output.flush()
        output.end()
    assert not output.is_gone
    assert capsys.readouterr().err.count("warning: the output cannot be written") == 1


def test_output_that_was_closed_before_the_start_is_none() -> None:
    output = Output(None)
    assert output.write("text") == 4 and not output.isatty()
    output.flush()
    output.end()
    assert not output.is_gone

"""`python -m core.checkpoint`: what it prints, and its exit status, on whole and on damaged directories."""

import subprocess
import sys
from pathlib import Path

import pytest

from core.checkpoint import CheckpointSaver
from core.checkpoint.__main__ import main
from core.checkpoint.root_directory import list_committed
from tests.unit_tests.checkpoint.checkpoint_saves import fill_with, save_alone, state_of
from tests.unit_tests.forked_python import run_python

ROOT = Path(__file__).parents[3]
INTACT, DAMAGED, USAGE_ERROR = 0, 1, 2


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_alone(tmp_path / "a run", 3, 6, world=2)
    return tmp_path / "a run"


def flip_weight(directory: Path) -> Path:
    """Change one bit of a large tensor."""
    path = directory / "rank_00000_000.distcp"
    data = bytearray(path.read_bytes())
    data[700] ^= 4
    path.write_bytes(data)
    return path


def test_inspect_shows_steps_layout_tensors_and_sizes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".saving-step_00000009.0003-abcd").mkdir()
    assert main(["inspect", str(root), "--files"]) == INTACT
    text = capsys.readouterr().out
    first, second = text.split("\n\n")
    assert "step_00000003.0001: step 3" in first and "step_00000006.0002 (latest): step 6" in first
    assert ".saving-step_00000009.0003-abcd: a save or deletion that has not ended" in first
    assert "step 6, commit 2 of this root" in second and "saved by 1 ranks (dp 2)" in second
    assert "9 tensors, " in second and "rank1.weight  float32   [31, 17]  2108 bytes" in second
    assert "shared.bias   float32   [40, 10]  1600 bytes" in second or "shared.bias" in second
    assert "crc32" in second and "rank_00000_000.distcp: rank 0" in second


@pytest.mark.parametrize(
    ("layout", "shown"),
    [
        ({"tp": 2, "dp": 1, "ep": 1, "etp": 2}, "(tp 2, dp 1, ep 1)"),  # a dense model's, or the experts' default
        ({"tp": 2, "dp": 2, "ep": 2, "etp": 2}, "(tp 2, dp 2, ep 2, etp 2)"),
        ({"tp": 2, "dp": 2, "ep": 1, "etp": 1}, "(tp 2, dp 2, ep 1, etp 1)"),
    ],
)
def test_inspect_shows_the_experts_own_size_only_where_it_says_something(
    layout: dict[str, int], shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with CheckpointSaver(tmp_path) as saver:
        saver.save(1, fill_with(state_of(1, 0)), meta={"layout": layout})
    assert main(["inspect", str(tmp_path)]) == INTACT
    assert capsys.readouterr().out.count(f"1 ranks {shown}") == 2


def test_inspect_takes_a_step_by_number_or_by_its_directory(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(root), "--step", "3"]) == INTACT
    by_number = capsys.readouterr().out
    assert main(["inspect", str(root / "step_00000003.0001")]) == INTACT
    assert capsys.readouterr().out == by_number
    assert "step 3, commit 1" in by_number and "step 6" not in by_number


def test_inspect_shows_what_is_left_of_a_damaged_directory(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = list_committed(root)[-1].path
    (newest / "rank_00000_001.distcp").unlink()
    assert main(["inspect", str(root)]) == INTACT
    assert "DAMAGED: rank_00000_001.distcp is missing" in capsys.readouterr().out
    (newest / "commit.json").write_bytes(b"{}")
    assert main(["inspect", str(root)]) == DAMAGED
    text = capsys.readouterr().out
    assert "DAMAGED: commit.json is JSON of another kind" in text and "no commit.json vouches for it" in text
    assert "rank1.weight" in text
    (newest / "manifest.json").write_bytes(b"\x00\xff")
    assert main(["inspect", str(root)]) == DAMAGED
    assert "step_00000006.0002 (latest): damaged: commit.json" in capsys.readouterr().out


def test_verify_reads_every_byte_and_names_the_bad_file_and_tensor(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(root)]) == INTACT
    assert [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()] == ["ok", "ok"]
    bad = flip_weight(list_committed(root)[-1].path)
    assert main(["verify", str(root)]) == DAMAGED
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok ") and "step_00000003.0001" in lines[0]
    assert lines[1].startswith(f"DAMAGED {bad.parent}: {bad.name} (written by rank 0) has other bytes than were saved")
    assert "in the damaged part: 'rank0.weight'" in lines[1]
    assert lines[2] == "1 of 2 checkpoints are damaged; loading takes the newest intact one"
    assert main(["verify", str(root), "--step", "3"]) == INTACT
    assert main(["verify", str(bad.parent)]) == DAMAGED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "nowhere"], "is no directory"),
        (["inspect", "."], "There is no checkpoint in"),
        (["verify", "a run", "--step", "5"], "no checkpoint of step 5 in .*steps there: 3, 6"),
        (["verify", "a run/step_00000003.0001", "--step", "3"], "is one step's directory"),
    ],
)
def test_what_is_not_there_is_an_error_in_one_line(
    arguments: list[str],
    message: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(root.parent)
    assert main(arguments) == USAGE_ERROR
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


def test_the_command_runs_as_a_module_and_its_status_says(root: Path) -> None:
    flip_weight(list_committed(root)[-1].path)
    done = run_python("-m", "core.checkpoint", "verify", root, folder=root.parent)
    assert done.returncode == DAMAGED and "DAMAGED" in done.stdout, done.stderr


def test_a_reader_that_goes_away_early_gets_no_traceback(root: Path) -> None:
    command = f"{sys.executable} -m core inspect '{root}' | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == "" and done.stdout.strip() == "141", "neither intact nor damaged: nobody has read it"

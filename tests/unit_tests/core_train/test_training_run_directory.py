"""A run's directory: never another run's, never written by two at once, and the same again when a run goes on."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tyro")

from core import parallel_state
from core_plan.job.config import JobConfig
from core_plan.job.config_file import load_config
from core_plan.job.errors import ConfigError
from core_plan.job.plan import plan_job
from core_plan.job.run_directory import CONFIGURATION, RunDirectory
from core_train.commands.generate import checkpoints_of
from core_train.job import train
from core_train.main import main
from core_train.reporter import GENERATE, Reporter
from tests.unit_tests.core_train.training_reference import CPU, TINY, text_flags_in
from tests.unit_tests.ranks import ranks


def finish(run: RunDirectory) -> None:
    with run:
        (run.path / CONFIGURATION).write_text("{}")


def test_each_run_of_a_name_has_a_directory_of_its_own(tmp_path: Path) -> None:
    for expected in ("a", "a-2", "a-3"):
        run = RunDirectory.new(tmp_path, "a")
        assert run.path == tmp_path / expected
        finish(run)
    with RunDirectory.new(tmp_path, "b") as first, RunDirectory.new(tmp_path, "b") as second:
        assert (first.path.name, second.path.name) == ("b", "b-2"), "two at once, before either has written a file"
    (tmp_path / "c" / "checkpoints").mkdir(parents=True)
    with RunDirectory.new(tmp_path, "c") as run:
        assert run.path.name == "c", "a directory without a run in it is taken"


def test_a_run_that_goes_on_has_its_own_directory_again_unless_it_has_another_name(tmp_path: Path) -> None:
    finish(RunDirectory.new(tmp_path, "a"))
    finish(RunDirectory.new(tmp_path, "a"))
    for name, saved, expected in (("a", "a-2", "a-2"), ("a", "a", "a"), ("b", "a", "b"), ("a", "ab", "a-3")):
        with RunDirectory.again(tmp_path, name, saved) as run:
            assert run.path.name == expected
    with RunDirectory.again(tmp_path, "gone", "gone-4") as run:
        assert run.path.name == "gone-4", "deleted in between: made anew"


def test_a_directory_that_a_live_process_writes_to_is_refused_and_that_of_a_killed_one_is_not(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from core_plan.job.run_directory import RunDirectory\n"
        "run = RunDirectory.new(Path(sys.argv[1]), 'a'); (run.path / 'config.json').touch()\n"
        "print(run.path.name, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "a\n"
    with pytest.raises(ConfigError, match=rf"a is written to by another run .*process {process.pid} on "):
        RunDirectory.again(tmp_path, "a", "a")
    process.kill()
    process.communicate(timeout=30)
    with RunDirectory.again(tmp_path, "a", "a") as run:
        assert run.path.name == "a"


@ranks(2, timeout_s=120.0)
@pytest.mark.nightly
def test_a_second_run_leaves_the_first_alone_and_each_goes_on_in_its_own_directory(
    rank: int, world: int, tmp_path: Path
) -> None:
    flags = [*TINY, *text_flags_in(tmp_path / "tokens"), "--tp", "1", "--logging.no-plots", "--run.steps", "4"]
    flags += ["--run.validation-windows", "4", "--optimizer.warmup-steps", "1", "--run.directory", str(tmp_path)]

    def run(name: str, *more: str) -> None:
        parallel_state.destroy_model_parallel()
        config = load_config([*flags, "--checkpoint.dir", str(tmp_path / name), *more])
        train(config, plan_job(config, world), CPU, prepares_data=rank == 0)

    def steps(name: str) -> list[int]:
        return [json.loads(line)["step"] for line in (tmp_path / name / "steps.jsonl").read_text().splitlines()]

    run("first")
    before = (tmp_path / "tiny" / "steps.jsonl").read_bytes()
    run("second", "--run.stop-after", "2")
    with pytest.raises(ConfigError, match=r"second holds checkpoints of another run \(steps 2 to 2\), .*resume"):
        run("second")
    assert (steps("tiny"), steps("tiny-2")) == ([1, 2, 3, 4], [1, 2])
    run("second", "--checkpoint.resume", "--run.stop-after", "3")
    assert steps("tiny-2") == [1, 2, 3]
    run("second", "--checkpoint.resume", "--run.name", "branch")
    run("second", "--checkpoint.resume", "--run.name", "branch")  # nothing left to do
    assert (steps("tiny-2"), steps("branch")) == ([1, 2, 3], [4])
    assert (tmp_path / "tiny" / "steps.jsonl").read_bytes() == before
    if rank == 0:
        held = RunDirectory.again(tmp_path, "branch", "branch")
    with pytest.raises(
        ConfigError, match=f"branch is written to by another run .*process {'' if rank else os.getpid()}"
    ):
        run("second", "--checkpoint.resume", "--run.name", "branch")
    if rank == 0:
        os.close(held.lock or 0)


def test_what_is_not_there_or_not_free_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("core_train.main.start_ranks", lambda _: pytest.fail("ranks were started"))
    (tmp_path / "root" / "step_00000040.0001").mkdir(parents=True)
    short = tmp_path / "short.txt"
    short.write_text("short")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for flags, message in (
        (["--checkpoint.dir", str(tmp_path / "root")], "holds checkpoints of another run (steps 40 to 40)"),
        (["--data.text", str(tmp_path / "no.txt")], "no.txt is neither a file nor a directory"),
        (["--data.tokenizer", str(tmp_path / "no.json")], "no.json': not 'bytes', not 'bpe', and no such file"),
        (["--run.name", "../x"], "--run.name is '../x'; it names one directory"),
        (["--data.text", str(short), "--data.tokenizer", "bytes"], "the text has 5 tokens to train on, and one window"),
        (["--data.megatron", str(short)], "short.txt.bin"),
        (["--logging.trackers", "wandb"], "--logging.trackers wandb needs the package 'wandb'"),
        (["--run.device", "cuda", "--run.ranks", "2"], "--run.device cuda needs a GPU for each of the 2 ranks"),
    ):
        for dry in ([], ["--dry-run"]):  # which makes every check of a start
            assert main([*flags, *dry]) == 2
            assert message in capsys.readouterr().err
    assert main(["--data.text", str(tmp_path / "no.txt"), "--dry-run", "--device", "h100"]) == 0, "of another machine"


def test_a_directory_that_is_neither_a_run_nor_a_model_is_not_called_a_run(tmp_path: Path) -> None:
    """`convert` of a model's directory whose config.json is another program's."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is neither a run's configuration"):
        checkpoints_of(tmp_path)


def test_printed_commands_can_be_pasted(tmp_path: Path) -> None:
    reporter: Any = Reporter.__new__(Reporter)
    reporter.directory, reporter.hint = tmp_path / "my run", GENERATE
    reporter.log, reporter.config = SimpleNamespace(records=[]), JobConfig()
    words = shlex.split(reporter._what_next(tmp_path / "my run" / "checkpoints").replace(";", " ").replace("\n", " "))
    assert str(tmp_path / "my run") in words and str(tmp_path / "my run" / "checkpoints") in words

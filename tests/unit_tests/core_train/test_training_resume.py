"""A run that stops and goes on is the run that did not stop: bit for bit, and closely in another layout."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

pytest.importorskip("tyro")

from core import parallel_state
from core.checkpoint import list_steps
from core.checkpoint.root_directory import list_committed
from core_plan.job.config import JobConfig
from core_plan.job.config_file import ConfigError, load_config, merge
from core_plan.job.plan import plan_job
from core_train.checkpoint_options import as_json, compare_configurations
from core_train.checkpoints import check_text, kept_of
from core_train.job import JobResult, train
from core_train.main import check_places
from core_train.trainer import Trainer
from tests.unit_tests.core_train.training_reference import (
    CPU,
    ROOT,
    TINY,
    losses_on_ranks,
    read_losses,
    records_of,
)
from tests.unit_tests.ranks import ranks

STEPS = 6
SHORT = [*TINY, "--run.steps", str(STEPS), "--optimizer.warmup-steps", "2", "--run.validation-windows", "4"]
EXPERTS = ["--model.num-experts", "4"]


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, ["--tp", "1", "--model.hidden-dropout", "0.1", "--checkpoint.async"]),
        (4, ["--tp", "1", "--pp", "2", "--ep", "2", *EXPERTS]),
        pytest.param(2, ["--tp", "2", "--model.dtype", "bfloat16"], marks=pytest.mark.nightly),
        (2, ["--tp", "1", "--model.dtype", "float16", "--optimizer.initial-loss-scale", "2.4e5"]),
    ],
    ids=["dropout-async", "pp2-ep2", "bf16", "fp16"],
)
@pytest.mark.in_suite(1)
def test_a_run_in_two_parts_has_the_losses_of_one_run_bit_for_bit(
    tmp_path: Path, text_flags: list[str], world: int, flags: list[str]
) -> None:
    flags = [*SHORT, *text_flags, *flags]
    whole = losses_on_ranks(world, flags, tmp_path / "whole", timeout_s=120.0)
    saved = ["--checkpoint.dir", str(tmp_path / "checkpoints"), "--checkpoint.every", "2", "--checkpoint.keep", "2"]
    first = losses_on_ranks(world, [*flags, *saved, "--run.stop-after", "3"], tmp_path / "parts", timeout_s=120.0)
    assert list_steps(tmp_path / "checkpoints") == [2, 3]
    losses = losses_on_ranks(world, [*flags, *saved, "--checkpoint.resume"], tmp_path / "parts", timeout_s=120.0)
    assert first == whole[:3]
    updated = [record["updated"] for record in records_of(tmp_path / "whole" / "run")]
    assert any(updated[3:]) and (all(updated) or "float16" in flags), "only fp16 skips, while its loss scale comes down"
    assert losses == whole, "the records before the stop are kept, those after it are the same numbers"
    assert list_steps(tmp_path / "checkpoints") == [4, 6]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (4, ["--tp", "1", "--pp", "2"]),
        pytest.param(2, ["--tp", "1", "--ep", "2", "--ddp.no-overlap-param-gather"], marks=pytest.mark.nightly),
    ],
    ids=["dp2-pp2", "dp2-ep2"],
)
def test_another_layout_goes_on_with_the_same_losses(
    tmp_path: Path, text_flags: list[str], world: int, layout: list[str]
) -> None:
    flags = [*SHORT, *text_flags, *EXPERTS]
    whole = losses_on_ranks(2, [*flags, "--tp", "2"], tmp_path / "whole", timeout_s=120.0)
    saved = ["--checkpoint.dir", str(tmp_path / "checkpoints")]
    stop = ["--run.stop-after", "3", "--tp", "2"]
    losses_on_ranks(2, [*flags, *saved, *stop], tmp_path / "parts", timeout_s=120.0)
    resumed = [*flags, *saved, *layout, "--checkpoint.resume"]
    losses = losses_on_ranks(world, resumed, tmp_path / "parts", timeout_s=120.0)
    assert whole[0] - whole[-1] > 0.2, "the losses must move by far more than the bound"
    assert losses == pytest.approx(whole, abs=2e-5, rel=0)


@ranks(2, timeout_s=120.0)
def test_what_does_not_fit_the_checkpoint_is_refused_on_every_rank_and_a_longer_schedule_can_be_asked_for(
    rank: int, world: int, tmp_path: Path, text_flags: list[str]
) -> None:
    if rank == 0:
        for name, letter in (("a", "a"), ("b", "b")):  # texts of one length
            (tmp_path / f"{name}.txt").write_text(letter * 5000)
    dist.barrier()
    flags = [*SHORT, *text_flags, "--tp", "1", "--logging.no-plots", "--run.directory", str(tmp_path)]
    flags += ["--checkpoint.dir", str(tmp_path / "checkpoints"), "--data.text", str(tmp_path / "a.txt")]

    def run(*more: str) -> JobResult:
        parallel_state.destroy_model_parallel()
        config = load_config([*flags, *more])
        return train(config, plan_job(config, world), CPU, prepares_data=rank == 0)

    run("--run.stop-after", "2")
    for more, message in (
        (
            ["--run.steps", "8"],
            r"--run.steps, which sets lr_decay_steps \(saved 40, configured 56\).* set --checkpoint\.sch",
        ),
        (["--model.hidden-size", "48"], r"has shape \[256, 32\] in the checkpoint and \[256, 48\] in this model"),
        (["--model.num-attention-heads", "2"], "saved with --model.num-attention-heads 4, and this run has 2"),
        (["--run.seed", "5"], "belongs to seed 1234 and this sampler has 5"),
        (["--data.text", str(tmp_path / "b.txt")], r"tokens, digest \w{12}\), and this run's text is .*b\.txt \("),
        (["--checkpoint.step", "7"], r"--checkpoint\.step 7: .*no such step"),
    ):
        with pytest.raises(ConfigError, match=message):
            run("--checkpoint.resume", *more)
    other = ["--checkpoint.resume", "--model.hidden-size", "48"]
    with pytest.raises(ConfigError, match=r"saved with --model\.hidden-size 32, and this run has 48; resume with"):
        check_places(load_config([*flags, *other]), 1)  # before ranks start
    check_places(load_config([*flags, "--checkpoint.resume"]), 1)
    assert len(run("--checkpoint.resume", "--run.steps", "8", "--checkpoint.schedule", "given").losses) == 6


@ranks(1, timeout_s=120.0)
def test_a_damaged_checkpoint_is_passed_over_and_the_run_says_which_and_why(
    rank: int, world: int, tmp_path: Path, text_flags: list[str]
) -> None:
    flags = [*SHORT, *text_flags, "--tp", "1", "--logging.no-plots", "--run.directory", str(tmp_path)]
    flags += ["--checkpoint.dir", str(tmp_path / "checkpoints"), "--checkpoint.every", "1"]

    def run(*more: str) -> str:
        parallel_state.destroy_model_parallel()
        config, printed = load_config([*flags, *more]), io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # the job says it itself, once
            train(config, plan_job(config, world), CPU, prepares_data=True)
        return printed.getvalue()

    run("--run.stop-after", "2")
    newest = list_committed(tmp_path / "checkpoints")[-1].path
    (newest / "rank_00000_000.distcp").unlink()
    said = [line for line in run("--checkpoint.resume", "--run.stop-after", "3").splitlines() if "going on" in line]
    assert len(said) == 1
    assert said[0].startswith(f"Checkpoint of step 2 in {newest} is damaged: rank_00000_000.distcp (")
    assert ". going on after step 1 from " in said[0] and said[0].count("damaged:") == 1


def run_command(flags: list[str], program: Sequence[str] = (str(ROOT / "pretrain_gpt.py"),)) -> subprocess.Popen[str]:
    unwanted = {"RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    command = [sys.executable, *program, *flags]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=inherited, cwd=ROOT, **pipes)


@ranks(2)
def test_sigterm_to_one_rank_ends_the_run_of_all_ranks_with_a_checkpoint(
    rank: int, world: int, tmp_path: Path, text_flags: list[str]
) -> None:
    flags = [*SHORT, *text_flags, "--tp", "1", "--logging.no-plots", "--run.directory", str(tmp_path)]
    config = load_config([*flags, "--run.steps", "50", "--checkpoint.dir", str(tmp_path / "checkpoints")])
    train_step, steps = Trainer.train_step, []

    def signalled_in_step_3(trainer: Trainer, **options: Any) -> Any:
        steps.append(trainer.step)
        if len(steps) == 3 and rank == 1:
            signal.raise_signal(signal.SIGTERM)  # what a scheduler sends, to any rank, at any moment
        return train_step(trainer, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", signalled_in_step_3)
        result = train(config, plan_job(config, world), CPU, prepares_data=rank == 0)
    assert result.stopped and len(steps) in (3, 4), "the step at hand is done, and perhaps one more"
    assert list_steps(tmp_path / "checkpoints") == [len(steps)]
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, len(steps))
    assert len(set(everybody)) == 1


@ranks(2)
def test_sigterm_in_the_last_validation_ends_it(rank: int, world: int, tmp_path: Path, text_flags: list[str]) -> None:
    flags = [*SHORT, *text_flags, "--tp", "1", "--logging.no-plots", "--run.directory", str(tmp_path)]
    config = load_config([*flags, "--run.steps", "1", "--run.validation-windows", "16", "--run.micro-batch-size", "1"])
    token_losses, batches = Trainer.token_losses, []

    def signalled_in_batch_2(trainer: Trainer, *arguments: Any) -> Any:
        batches.append(trainer.step)
        if len(batches) == 2 and rank == 1:
            signal.raise_signal(signal.SIGTERM)
        return token_losses(trainer, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "token_losses", signalled_in_batch_2)
        result = train(config, plan_job(config, world), CPU, prepares_data=rank == 0)
    assert result.stopped and result.validation_loss is None and len(result.losses) == 1
    assert len(batches) in (2, 3), "of eight"


@ranks(1)
def test_a_full_disk_under_the_run_ends_no_training(
    rank: int, world: int, tmp_path: Path, text_flags: list[str]
) -> None:
    flags = [*SHORT, *text_flags, "--tp", "1", "--run.directory", str(tmp_path), "--run.name", "full"]
    config = load_config([*flags, "--run.steps", "3", "--logging.trace"])
    (tmp_path / "full").mkdir()
    for name in ("steps.jsonl", "summary.json", "gradients.txt", "loss.png", "buckets.png"):
        (tmp_path / "full" / name).symlink_to("/dev/full")
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        result = train(config, plan_job(config, world), CPU, prepares_data=True)
    assert len(result.losses) == 3 and result.validation_loss is not None
    assert heard.getvalue().count("training continues without these files") == 1, heard.getvalue()
    assert "No space left on device" in heard.getvalue()


def test_what_is_to_be_read_and_cannot_be_is_refused_before_ranks_start(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "no.json").write_text('{"model": 3}')
    os.mkfifo(tmp_path / "fifo")
    for flag, name in (("--data.tokenizer", "no.json"), ("--data.tokenizer", "fifo"), ("--data.text", "fifo")):
        with pytest.raises(ConfigError, match=flag):
            check_places(load_config(["--run.directory", str(tmp_path), flag, str(tmp_path / name)]), 1)
    for name, content in (("latin.toml", b"name = '\xe9'"), ("deep.toml", b"a = " + b"[" * 10**5), ("fifo", None)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            load_config(["--config", str(tmp_path / name)])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(["--config", str(tmp_path)])


def test_a_directory_that_cannot_be_written_is_refused_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for flag in ("--run.directory", "--checkpoint.dir"):
        config = load_config(["--run.directory", str(tmp_path), flag, str(tmp_path / "file" / "below")])
        with pytest.raises(ConfigError, match=rf"{flag} .*file is no directory that this user may write to"):
            check_places(config, 1)
        check_places(load_config(["--run.directory", str(tmp_path), flag, str(tmp_path / "new" / "deep")]), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.nightly
def test_sigterm_to_one_rank_saves_on_all_ranks_and_the_command_ends_well(
    tmp_path: Path, text_flags: list[str]
) -> None:
    flags = [*TINY, *text_flags, "--run.directory", str(tmp_path), "--run.ranks", "2", "--logging.no-plots"]
    flags += ["--run.steps", "100000", "--logging.print-every", "1", "--checkpoint.dir", str(tmp_path / "checkpoints")]
    process = run_command(flags)
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 3/"):
            break
    children = psutil.Process(process.pid).children()
    by_rank = {child.environ()["RANK"]: child for child in children if "RANK" in child.environ()}
    by_rank["1"].send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=120)
    output = "".join(seen) + rest
    assert process.returncode == 0, output
    assert list_steps(tmp_path / "checkpoints") == [records_of(tmp_path / "tiny")[-1]["step"]]
    assert "stopped before step" in output


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_in_the_middle_of_a_save_costs_only_the_steps_since_the_one_before(
    tmp_path: Path, text_flags: list[str], killed: int, asynchronous: bool
) -> None:
    flags = [*TINY, *text_flags, "--run.ranks", "2", "--logging.no-plots", "--run.steps", "9", "--tp", "2"]
    flags += ["--checkpoint.every", "3", *(["--checkpoint.async"] if asynchronous else [])]

    def run(name: str, *more: str, **program: Sequence[str]) -> tuple[int, str]:
        places = ["--run.directory", str(tmp_path / name), "--checkpoint.dir", str(tmp_path / name / "checkpoints")]
        process = run_command([*flags, *places, *more], **program)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    assert run("whole")[0] == 0
    # the second save, of step 6: `kill -9` by the rank itself, with half of its file written
    killing = ("-m", "tests.unit_tests.checkpoint.kill_points", f"half a file:{killed}:2")
    status, output = run("parts", program=killing)
    assert status != 0, output
    assert list_steps(tmp_path / "parts" / "checkpoints") == [3]
    status, output = run("parts", "--checkpoint.resume")
    assert status == 0 and "going on after step 3" in output, output
    whole, parts = (read_losses(tmp_path / name / "tiny") for name in ("whole", "parts"))
    assert len(whole) == 9 and parts == whole


# -- what a run that goes on must agree with -------------------------------------------------------------------------


def changed(**sections: dict[str, object]) -> dict[str, Any]:
    return as_json(merge(JobConfig(), sections, "test"))


def test_another_model_is_refused_and_other_options_are_reported() -> None:
    saved = as_json(JobConfig())
    with pytest.raises(ConfigError, match=r"saved with --model\.activation gelu, and this run has swiglu"):
        compare_configurations(saved, changed(model={"activation": "swiglu"}))
    assert compare_configurations(saved, saved) == []
    now = changed(parallel={"tp": 1}, model={"recompute_granularity": "full"}, checkpoint={"keep": 3})
    assert compare_configurations(saved, now) == [
        "other options: model.recompute_granularity None -> full, parallel.tp 2 -> 1"
    ]
    older = {section: dict(options) for section, options in saved.items()}
    older["model"].pop("activation")  # saved before there was such an option
    assert compare_configurations(older, changed(model={"activation": "swiglu"})) == []


def test_another_text_of_the_same_length_is_refused_and_the_same_text_elsewhere_is_taken() -> None:
    header = {"text": "novels", "text_bytes": 10, "tokens": 12, "vocab_size": 256, "digest": "aaaa"}
    check_text(header, {**header, "text": "the same, elsewhere"})
    with pytest.raises(ConfigError, match=r"novels \(12 tokens, digest aaaa\), .* poems \(12 tokens, digest bbbb\)"):
        check_text(header, {**header, "text": "poems", "digest": "bbbb"})


def test_a_checkpoint_that_another_program_saved_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    """A loop of the user's own saved it with save_checkpoint; the run ended with KeyError 'text'."""
    assert kept_of({"text": 1, "run": None}, tmp_path, "run", "text") == [None, 1]
    with pytest.raises(ConfigError, match="not saved by this job, so .* its manifest lacks 'text' and 'run'"):
        kept_of({"sampler": {}}, tmp_path, "text", "sampler", "run")


def test_options_of_checkpoints_need_a_directory() -> None:
    for flags in (["--checkpoint.every", "5"], ["--checkpoint.resume"], ["--checkpoint.step", "3"]):
        with pytest.raises(ConfigError, match="need --checkpoint.dir"):
            plan_job(load_config(flags), 4)
        plan_job(load_config([*flags, "--checkpoint.dir", "somewhere"]), 4)
    with pytest.raises(ConfigError, match="--checkpoint.keep must be an integer of at least 1"):
        plan_job(load_config(["--checkpoint.keep", "0"]), 4)


def test_a_schedule_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_lr 0.0002 and max_lr 0.0001: expected 0 <= min_lr <= max_lr"):
        plan_job(load_config(["--optimizer.lr", "1e-4"]), 4)

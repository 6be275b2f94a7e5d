"""The command: a plan on standard output, and refusals that do the arithmetic."""

from pathlib import Path

import pytest

from core.plan import plan_run
from core.plan.command import main

ROOT = Path(__file__).parents[3]
TINY = ["--model", str(ROOT / "configs" / "tiny.toml")]


def test_a_run_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--ranks", "4", "--tp", "2", "--pp", "2", "--global-batch", "8"]) == 0
    shown = capsys.readouterr().out
    assert "rank 0 (stage 0)  rank 2 (stage 1)" in shown
    assert "fits: rank" in shown


def test_a_run_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--model.num-layers", "24", "--model.hidden-size", "2048", "--model.num-attention-heads", "16"]
    large += ["--model.sequence-length", "4096", "--run.global-batch-size", "64", "--ddp.bucket-size", "40000000"]
    assert main([*TINY, *large, "--ranks", "8", "--tp", "1", "--device", "a100"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    changes = shown.partition("it would fit with one of these:\n")[2].splitlines()
    assert len(changes) == 3
    assert changes[0].split()[:2] == ["--run.micro-batch-size", "4"]


def test_a_dry_run_of_the_main_job_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    from core.finetune.main import main as finetune
    from core.training.main import main as train

    arguments = ["--config", TINY[1], "--run.device", "cpu"]
    assert train([*arguments, "--dry-run"]) == 0
    assert "fits: rank 0 holds most" in capsys.readouterr().out
    large = ["--model.hidden-size", "65536", "--model.num-layers", "40", "--model.vocab-size", "65536"]
    assert train([*arguments, *large, "--dry-run"]) == 1
    assert "does not fit: rank" in capsys.readouterr().out
    assert finetune(["--dry-run"]) == 2
    assert "--dry-run is for the main job" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ranks", "6", "--tp", "4"], "6 ranks are not divisible by tp 4"),
        (["--ranks", "8", "--tp", "8"], "--model.num-attention-heads 4 is not divisible by tp 8"),
        (["--ranks", "4", "--device", "b900"], "known are a100, h100, h200, mi300x"),
        (["--ranks", "4", "--device", "b900"], "h100.json, measured on your machine"),
        (["--ranks", "3", "--tp", "1"], "--run.global-batch-size 8 is not divisible by dp"),
    ],
)
def test_what_cannot_be_built_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *flags]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert words in told
    assert len(told.splitlines()) == 1


def test_sixteen_thousand_ranks() -> None:
    """A mixture of experts over all axes, and no rank of it runs."""
    from core.training.config_file import load_config

    flags = "--model.num-layers 16 --model.hidden-size 1024 --model.num-attention-heads 16 --model.num-experts 64"
    flags += " --model.moe-layer-freq 1 --model.dtype bfloat16 --tp 8 --pp 16 --parallel.ep 64 --parallel.etp 1"
    flags += " --run.global-batch-size 4096 --run.micro-batch-size 1 --model.vocab-size 4096"
    plan = plan_run(load_config(flags.split()), 16384, "h200")
    assert [memory.rank for memory in plan.memories] == [1024 * place for place in range(16)]
    in_flight = [memory.highest.held["activations"] for memory in plan.memories]
    assert in_flight == sorted(in_flight, reverse=True)  # 1F1B keeps as many microbatches as stages follow
    assert plan.fits

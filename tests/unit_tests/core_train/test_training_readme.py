"""The runs that the README shows have the same losses in every layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from core_train import compare
from tests.unit_tests.core_train.training_reference import REPLICATED, ROOT, losses_on_ranks, text_flags_in

README_COMMAND = re.compile(r"^    python pretrain_gpt\.py (--config configs/experts\.toml.*)$", re.MULTILINE)
DEFAULTS = {
    "tp2-sp-dp2-optim": (4, []),
    "dp4-no_shard": (4, ["--tp", "1", *REPLICATED]),
    "tp2-sp-pp2": (4, ["--pp", "2"]),
    "tp2-cp2": (4, ["--cp", "2"]),
    "1rank": (1, ["--tp", "1"]),
}


def readme_layouts() -> dict[str, list[str]]:
    """The flags of every run with experts that the README shows, by name of the run."""
    commands = [flags.split() for flags in README_COMMAND.findall((ROOT / "README.md").read_text())]
    return {flags[flags.index("--run.name") + 1] if "--run.name" in flags else "experts": flags for flags in commands}


def test_the_readme_shows_one_model_whole_in_two_stages_and_with_experts_on_two_ranks() -> None:
    layouts = readme_layouts()
    assert len(layouts) == 3
    assert sum("--pp" in flags for flags in layouts.values()) == 1
    assert sum("--ep" in flags for flags in layouts.values()) == 1


def readme_losses(directory: Path, flags: list[str], timeout_s: float) -> dict[str, list[float]]:
    """The losses of the README's runs. Their own --run.name is overruled by the last one given."""
    config = ["--config", str(ROOT / "configs" / "experts.toml"), "--run.device", "cpu"]
    return {
        name: losses_on_ranks(4, [*config, *layout[2:], *flags], directory / name, timeout_s=timeout_s)
        for name, layout in readme_layouts().items()
    }


@pytest.mark.nightly
def test_the_first_steps_of_the_readmes_runs_have_the_same_losses(tmp_path: Path) -> None:
    small = ["--run.global-batch-size", "4", "--run.validation-windows", "4", "--run.stop-after", "4"]
    losses = readme_losses(tmp_path, [*small, *text_flags_in(tmp_path / "tokens")], timeout_s=120.0)
    first = losses.pop("experts")
    assert len(first) == 4 and first[0] - first[-1] > 0.1, "the losses must move by far more than the bound"
    for name in losses:
        assert losses[name] == pytest.approx(first, abs=2e-5, rel=0), name


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_first_50_losses_of_the_readmes_runs_are_the_same(tmp_path: Path) -> None:
    losses = readme_losses(tmp_path, ["--data.cache", str(tmp_path / "tokens")], timeout_s=600.0)
    first = losses.pop("experts")
    assert len(first) == 50 and first[0] - first[-1] > 1.5
    for name in losses:
        assert losses[name] == pytest.approx(first, abs=1e-4, rel=0), name


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_the_first_50_losses_of_the_default_job_are_the_same_in_every_layout(tmp_path: Path) -> None:
    common = ["--run.stop-after", "50", "--run.validation-windows", "8", "--data.cache", str(tmp_path / "tokens")]
    losses = {
        name: losses_on_ranks(world, [*common, *flags], tmp_path / name, timeout_s=600.0)
        for name, (world, flags) in DEFAULTS.items()
    }
    assert losses["1rank"][0] - losses["1rank"][-1] > 1.5
    for name in DEFAULTS:
        assert losses[name] == pytest.approx(losses["1rank"], abs=1e-4, rel=0), name


def write_run(directory: Path, losses: list[tuple[int, float]]) -> str:
    directory.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses]
    (directory / "steps.jsonl").write_text("".join(line + "\n" for line in lines))
    return str(directory)


def test_compare_says_how_far_runs_are_apart_and_fails_above_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, losses: list[float]) -> str:
        return write_run(tmp_path / name, list(enumerate(losses, start=1)))

    first, near, far = run("a", [3.0, 2.0, 1.0]), run("b", [3.0, 2.00005, 1.0, 0.5]), run("c", [3.0, 2.0, 1.001])
    assert compare.main([first, near]) == 0
    assert f"b: in 3 common steps at most 5.0e-05 away (step 2); only {near} has step 4\n" in capsys.readouterr().out
    assert compare.main([first, near, far]) == 1
    assert compare.main([first, run("nan", [3.0, float("nan"), 1.0])]) == 1
    assert compare.main([first]) == 2
    assert compare.main([first, run("empty", [])]) == 2


def test_compare_matches_the_losses_of_a_resumed_run_by_the_number_of_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_run(tmp_path / "whole", [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0), (5, 1.0)])
    resumed = write_run(tmp_path / "resumed", [(3, 3.00001), (4, 2.5), (5, 9.0), (4, 2.0), (5, 1.0)])
    assert compare.main([whole, resumed]) == 0
    said = capsys.readouterr().out
    assert f"{resumed}: steps 4 to 5 written again; the last line of a step counts" in said
    assert f"resumed: in 3 common steps at most 1.0e-05 away (step 3); only {whole} has steps 1 to 2" in said
    later = write_run(tmp_path / "later", [(7, 3.0), (9, 2.0)])
    assert compare.main([whole, later]) == 2
    assert "no step in common: steps 1 to 5 and steps 7, 9" in capsys.readouterr().err
    (tmp_path / "later" / "steps.jsonl").write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "lo')
    assert compare.main([whole, later]) == 2
    assert "line 2 has no step and loss" in capsys.readouterr().err

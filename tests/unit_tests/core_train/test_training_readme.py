"""The runs that the README shows have the same losses in every layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from core.verify.record.compare import main as compare
from core.verify.record.file import read_recording
from tests.unit_tests.core_train.training_reference import REPLICATED, ROOT, TINY, losses_on_ranks, text_flags_in

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
    assert compare([str(tmp_path / name / "run") for name in losses]) == 0, "as the README says"
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


def test_two_recorded_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*TINY, *text_flags_in(tmp_path / "tokens"), "--run.steps", "3", "--record", "1"]
    for name, more in (("tp", ["--tp", "2"]), ("pp", ["--tp", "1", "--pp", "2"]), ("seed", ["--run.seed", "7"])):
        losses_on_ranks(2, [*flags, *more], tmp_path / name)
    runs = [str(tmp_path / name / "run") for name in ("tp", "pp", "seed")]
    assert compare(runs[:2]) == 0
    assert "pp 2, float32), steps 1 to 3: no difference that rounding does not explain" in capsys.readouterr().out
    assert compare(runs) == 1
    assert "step 1, data: argument '0' of the model differs" in capsys.readouterr().out


def test_a_resumed_run_appends_to_its_recording(tmp_path: Path) -> None:
    flags = [*TINY, *text_flags_in(tmp_path / "tokens"), "--run.steps", "4", "--tp", "1", "--record", "1"]
    flags += ["--checkpoint.dir", str(tmp_path / "saved"), "--checkpoint.resume"]
    losses_on_ranks(1, [*flags, "--run.stop-after", "2"], tmp_path)
    losses_on_ranks(1, flags, tmp_path)
    assert [*read_recording(tmp_path / "run").steps] == [1, 2, 3, 4]

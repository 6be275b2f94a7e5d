"""Configuration: defaults, files, flags, and what is refused before any process group exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from core import extras
from core_plan.job.config import JobConfig
from core_plan.job.config_file import ConfigError, load_config, merge, to_json
from core_plan.job.plan import plan_job


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_flags_win_over_later_files_over_earlier_files_over_defaults(tmp_path: Path) -> None:
    first = write(tmp_path / "a.toml", "[model]\nnum_layers = 7\nhidden_size = 64\n[optimizer]\nlr = 1\n")
    second = write(tmp_path / "b.toml", "[model]\nhidden_size = 96\n[ddp]\nbucket_size = 5\n")
    config = load_config(["--config", first, f"--config={second}", "--model.num-layers", "9"])
    assert (config.model.num_layers, config.model.hidden_size, config.ddp.bucket_size) == (9, 96, 5)
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)
    assert config.model.sequence_length == JobConfig().model.sequence_length
    assert config.ddp.overlap_grad_reduce, "a file's table replaces the options it names, not the section"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nhiden_size = 3", "model.hiden_size is not an option; did you mean model.hidden_size?"),
        ("[modle]\nx = 3", "modle is not an option; did you mean model?"),
        ("[model]\nhidden_size = 'big'", "model.hidden_size is 'big'; expected int"),
        ("[model]\nnum_layers = true", "model.num_layers is True; expected int"),
        ("[model]\nactivation = 'relu'", "'relu'; it must be one of 'gelu', 'swiglu'"),
        ("model = 3", "model is a section"),
        ("[model\n", "is not valid TOML"),
        ("[ddp]\nbucket_size = 0", "bucket_size must be an integer of at least 1, or None, got 0"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(["--config", write(tmp_path / "wrong.toml", text)])
    assert "wrong.toml" in str(error.value) and message in str(error.value)


def test_an_option_of_several_types_takes_any_of_them(tmp_path: Path) -> None:
    for text, value in (("true", True), ("'all'", "all")):
        file = write(tmp_path / "a.toml", f"[ddp]\nkeep_params_whole = {text}\n")
        assert load_config(["--config", file]).ddp.keep_params_whole == value
    with pytest.raises(ConfigError, match="keep_params_whole is 'some'; it must be one of 'all'"):
        load_config(["--config", write(tmp_path / "b.toml", "[ddp]\nkeep_params_whole = 'some'\n")])


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no configuration file nowhere\.toml"):
        load_config(["--config", "nowhere.toml"])


def test_an_unknown_flag_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"options: --model\.hiden-size, 3\. Perhaps you meant --model\.hidden-size, "
    ):
        load_config(["--model.hiden-size", "3"])
    with pytest.raises(
        ConfigError, match=r"options: --lr, 1\. Perhaps you meant --optimizer\.lr, --optimizer\.min-lr$"
    ):
        load_config(["--lr", "1"])
    with pytest.raises(ConfigError, match=r"Unrecognized options: --zorp, 1$"):
        load_config(["--zorp", "1"])


def test_every_shipped_configuration_is_read_and_fits() -> None:
    files = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))
    assert files
    for file in files:
        config = load_config(["--config", str(file)])
        assert plan_job(config, config.run.ranks).dp >= 1


def test_the_written_configuration_reads_as_json() -> None:
    assert json.loads(to_json(JobConfig()))["parallel"]["tp"] == 2


def changed(**sections: dict[str, object]) -> JobConfig:
    return merge(JobConfig(), sections, "test")


def test_the_plan_resolves_what_the_options_leave_open() -> None:
    plan = plan_job(changed(run={"global_batch_size": 24, "micro_batch_size": 3}), 8)
    assert (plan.dp, plan.micro_batch_size, plan.num_microbatches) == (4, 3, 2)
    assert plan.tokens_per_step == 24 * 256
    assert plan_job(changed(run={"global_batch_size": 24}), 8).micro_batch_size == 6


def test_a_missing_package_is_an_error_that_names_the_extra() -> None:
    with pytest.raises(extras.MissingExtra, match=r"painting needs .*'no_such_package'.*gradient-core\[train\]"):
        extras.require("no_such_package.inner", "painting")

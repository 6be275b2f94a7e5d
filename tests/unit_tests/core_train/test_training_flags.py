"""Odd values of every flag: refused in one line by name before ranks start, or listed here as meaning something."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("tyro")

from core_plan.job.config import JobConfig
from core_plan.job.config_file import ddp_defaults, given_options, load_config, merge
from core_plan.job.errors import ConfigError
from core_plan.job.limits import RANGES, flag
from core_plan.job.plan import plan_job
from core_train.main import main

ODD = ("nan", "inf", "-inf", "-1", "0", "2.5", "True", "", "../x", "1" + 30 * "0")
LARGE = 2147483647  # the largest size
LARGE_FLOAT = ODD[-1]

# What an odd value of a flag means; every other one is refused.
NOT_NEGATIVE = {"0", "2.5", LARGE_FLOAT}
POSITIVE = {"2.5", LARGE_FLOAT}
MEANT: dict[str, set[str]] = {
    **dict.fromkeys(("optimizer.weight_decay", "optimizer.adam_eps"), NOT_NEGATIVE),
    "optimizer.lr": {"2.5", LARGE_FLOAT},  # 0 is below the default min_lr
    "optimizer.min_lr": {"0"},  # the others are above the default lr
    **dict.fromkeys(("optimizer.adam_beta1", "optimizer.adam_beta2", "optimizer.sgd_momentum"), {"0"}),
    "optimizer.clip_grad": {*NOT_NEGATIVE, "inf"},  # 0 and inf clip nothing
    **dict.fromkeys(("optimizer.loss_scale", "optimizer.initial_loss_scale", "model.init_method_std"), POSITIVE),
    "optimizer.warmup_steps": {"0"},  # no warm-up
    "optimizer.loss_scale_window": {LARGE_FLOAT},  # the scale never grows
    **dict.fromkeys(("ddp.bucket_size", "ddp.num_buckets"), {LARGE_FLOAT}),  # one bucket; one for each parameter
    "ddp.check_weights_interval": {"0", LARGE_FLOAT},  # never
    **dict.fromkeys(("model.hidden_dropout", "model.attention_dropout"), {"0"}),
    **dict.fromkeys(("model.moe_aux_loss_coeff", "model.moe_z_loss_coeff"), NOT_NEGATIVE),
    "model.moe_expert_capacity_factor": POSITIVE,
    "model.logits_chunk": {"0", LARGE_FLOAT},  # never in chunks; one chunk
    "model.recompute_num_layers": {"0", LARGE_FLOAT},  # none; all
    "run.seed": {"0"},
    "run.validate_every": {"0"},  # only at the end
    "checkpoint.step": {"0"},  # of a converted checkpoint
    "ddp.keep_params_whole": {"True"},
    "parallel.sequence_parallel": {"True"},
    "logging.peak_tflops": POSITIVE,
    **dict.fromkeys(("data.dataset", "data.split", "data.column"), set(ODD) - {""}),  # names, looked for later
    "data.tokenizer": {"nan", "inf", "-inf", "-1", "0", "2.5", "True", "../x", LARGE_FLOAT},  # a file, looked for later
    "run.name": {"nan", "inf", "-inf", "-1", "0", "2.5", "True", LARGE_FLOAT},
}
NEEDED = {"checkpoint.step": ["--checkpoint.dir", "somewhere"]}


def options() -> list[tuple[str, Any]]:
    """('section.option', type) of every option that is a number, a text or a choice."""
    found = []
    for section, kind in typing.get_type_hints(JobConfig).items():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            hint = hints[field.name]
            kinds = {hint, *typing.get_args(hint)}
            if kinds & {int, float, str} or typing.get_origin(hint) is Literal:
                found.append((f"{section}.{field.name}", hint))
    return found


def outcome(arguments: list[str]) -> str:
    """'taken', or the line that refuses."""
    try:
        plan_job(load_config(arguments), 4)
    except ConfigError as error:
        return str(error)
    return "taken"


SECTIONS = [field.name for field in dataclasses.fields(JobConfig)]


@pytest.mark.nightly  # the values are tried in a file below, and a flag's refusal by its name further below
@pytest.mark.parametrize("section", SECTIONS)
def test_every_odd_value_of_a_flag_is_refused_in_one_line_by_name_or_means_something(section: str) -> None:
    wrong = []
    tried = 0
    for option, _ in options():
        at, _, name = option.partition(".")
        if at != section:
            continue
        for value in ODD:
            tried += 1
            words = flag(at, name)
            said = outcome([f"{words}={value}", *NEEDED.get(option, [])])
            if value in MEANT.get(option, set()):
                if said != "taken":
                    wrong.append(f"{words} {value} means something, and: {said}")
            elif words not in said and f"({words.rpartition('.')[0]}" not in said or "\n" in said:
                wrong.append(f"{words} {value} is not refused by name in one line: {said}")
    assert not wrong, "\n".join(wrong)
    assert tried >= 20


def outcome_of_table(section: str, name: str, value: Any, **others: dict[str, Any]) -> str:
    """The same for a value in a TOML file, without reading flags."""
    tables: dict[str, dict[str, Any]] = {**others, section: {**others.get(section, {}), name: value}}
    try:
        plan_job(merge(JobConfig(ddp=ddp_defaults(given_options([tables], []))), tables, "job.toml"), 4)
    except ConfigError as error:
        return str(error)
    return "taken"


def test_every_odd_value_in_a_file_is_refused_by_name_or_means_something() -> None:
    wrong = []
    for option, hint in options():
        section, _, name = option.partition(".")
        numbers = bool({int, float} & {hint, *typing.get_args(hint)})
        others = {"checkpoint": {"dir": "somewhere"}} if option in NEEDED else {}
        for text in ODD:
            value = {"True": True, "": "", "../x": "../x"}.get(text)
            if value is None:
                value = text if not numbers else int(text) if text.lstrip("-").isdigit() else float(text)
            said = outcome_of_table(section, name, value, **others)
            meant = text in MEANT.get(option, set()) and (
                value is not True or str not in {hint, *typing.get_args(hint)}
            )
            named = name in said or flag(section, name) in said or f"(--{section}" in said
            if (said != "taken") if meant else (not named or said == "taken" or "\n" in said):
                wrong.append(f"{option} = {value!r}: {said}")
    assert not wrong, "\n".join(wrong)


def test_a_file_and_a_flag_are_refused_in_the_same_words(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[optimizer]\nclip_grad = nan\n")
    said = outcome(["--config", str(tmp_path / "job.toml")])
    assert said == outcome(["--optimizer.clip-grad", "nan"])
    assert said == "--optimizer.clip-grad must be a number of at least 0, got nan"


def test_the_largest_size_of_every_option_is_planned_or_refused_within_a_moment() -> None:
    for option, hint in options():
        section, _, name = option.partition(".")
        others: dict[str, dict[str, Any]] = {"checkpoint": {"dir": "somewhere"}} if option in NEEDED else {}
        for more in ({}, {"parallel": {"pp": 2}}, {"model": {"num_experts": 4}}):
            if int in {hint, *typing.get_args(hint)}:
                assert len(outcome_of_table(section, name, LARGE, **{**others, **more})) < 1000


def test_every_number_of_a_job_has_a_range() -> None:
    numbers = {option for option, hint in options() if {int, float} & {hint, *typing.get_args(hint)}}
    numbers -= {"parallel.layers_per_stage"}  # a list, checked with the layers
    listed = {f"{section}.{name}" for section, ranges in RANGES.items() for name in ranges}
    assert not numbers - listed


def test_a_refused_flag_ends_the_command_with_status_2_before_ranks_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("core_train.main.start_ranks", lambda _: pytest.fail("ranks were started"))
    for flags, message in (
        (["--optimizer.clip-grad", "nan"], "--optimizer.clip-grad must be a number of at least 0, got nan"),
        (
            ["--model.moe-aux-loss-coeff", "nan"],
            "--model.moe-aux-loss-coeff must be a finite number of at least 0, got",
        ),
        (["--optimizer.warmup-steps", "-3"], "--optimizer.warmup-steps must be an integer of at least 0 and at"),
        (["--run.threads-per-rank", "0"], "--run.threads-per-rank must be an integer of at least 1 and at most"),
        (["--run.threads-per-rank", "-4"], "--run.threads-per-rank must be an integer of at least 1 and at most"),
        (["--run.name", "../x"], "--run.name is '../x'; it names one directory in --run.directory"),
        (["--checkpoint.dir", ""], "--checkpoint.dir was given an empty value"),
        (["--data.text", "a", ""], "--data.text was given an empty value"),
        (["--ddp.bucket-size", "2.5"], "Error parsing --ddp.bucket-size"),
        (["--ddp.bucket-size", "0"], "--ddp.bucket-size must be an integer of at least 1, or None, got 0"),
    ):
        assert main(flags) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {message}") and said.count("\n") == 1


def test_help_names_every_option_and_ends_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert not [option for option, _ in options() if flag(*option.split(".")) not in shown]
    assert "--dry-run --device h100" in " ".join(shown.split())


# -- what the user says wins over a default --------------------------------------------------------------------------

STRATEGY = "--ddp.data-parallel-sharding-strategy"
REPLICATED, SHARDED = "--ddp.no-use-distributed-optimizer", "--ddp.use-distributed-optimizer"


@pytest.mark.parametrize(
    ("flags", "sharded", "gathers_overlap"),
    [
        ([], True, True),
        ([STRATEGY, "no_shard"], False, False),
        ([f"{STRATEGY}=no_shard"], False, False),
        (["--ddp.data_parallel_sharding_strategy", "no_shard", REPLICATED], False, False),
        ([REPLICATED], False, False),
        ([REPLICATED, "--ddp.no-overlap-param-gather"], False, False),
        ([SHARDED], True, True),
        ([STRATEGY, "optim_grads", "--ddp.no-overlap-param-gather"], True, False),
        ([STRATEGY, "optim", SHARDED], True, True),
        ([STRATEGY, "optim_grads_params"], True, False),
    ],
)
def test_sharding_is_what_the_flags_say(flags: list[str], sharded: bool, gathers_overlap: bool) -> None:
    config = load_config(flags)
    assert (config.ddp.sharded, config.ddp.overlap_param_gather) == (sharded, gathers_overlap)
    assert ("replicated" in plan_job(config, 4).describe(config)) == (not sharded)


def test_sharding_is_what_a_file_says_and_a_flag_wins(tmp_path: Path) -> None:
    file = ["--config", str(tmp_path / "job.toml")]
    (tmp_path / "job.toml").write_text("[ddp]\ndata_parallel_sharding_strategy = 'no_shard'\n")
    assert not load_config(file).ddp.sharded
    assert load_config([*file, STRATEGY, "optim"]).ddp.sharded
    with pytest.raises(ConfigError, match=f"{STRATEGY} no_shard and {SHARDED} contradict each other"):
        load_config([*file, SHARDED])
    (tmp_path / "job.toml").write_text("[ddp]\nuse_distributed_optimizer = true\n")
    assert not load_config([*file, REPLICATED]).ddp.sharded


@pytest.mark.parametrize(
    "flags",
    [[STRATEGY, "no_shard", SHARDED], [STRATEGY, "optim", REPLICATED], [REPLICATED, f"{STRATEGY}=optim_grads"]],
)
def test_flags_that_contradict_each_other_are_refused_by_both_names(flags: list[str]) -> None:
    said = outcome(flags)
    assert "contradict each other" in said and STRATEGY in said and (SHARDED in said or REPLICATED in said)
    assert re.search(
        "--ddp.overlap-param-gather .*nothing is sharded", outcome([REPLICATED, "--ddp.overlap-param-gather"])
    )


def test_a_number_of_buckets_wins_over_the_default_size_and_not_over_a_given_one() -> None:
    config = load_config(["--ddp.num-buckets", "3"])
    assert (config.ddp.num_buckets, config.ddp.bucket_size) == (3, None)
    said = outcome(["--ddp.num-buckets", "3", "--ddp.bucket-size", "100"])
    assert "--ddp.bucket-size (100) and --ddp.num-buckets (3) exclude each other" in said

"""The command: what it refuses before ranks start, and what a run leaves."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("trl")

import transformers

from core.__main__ import main as core_main
from core_train.commands.generate import main as generate
from core_train.finetune.arguments import load_config
from core_train.finetune.main import check, check_sizes, main, sample, tune
from tests.unit_tests.core_train.finetune.jobs import losses_of, make_model, options, written
from tests.unit_tests.integrations.loops import launched
from tests.unit_tests.ranks import ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("command")
    make_model(made)
    written(made, "completion")
    (made / "empty.jsonl").touch()
    (made / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (made / "other.jsonl").write_text('{"txt": "a"}\n')
    (made / "null.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    return made


REFUSED = [
    (["--data", "none.jsonl"], "--data none.jsonl cannot be read: Couldn't find any data file"),
    (["--data", "empty.jsonl"], "--data empty.jsonl cannot be read"),
    (["--data", "broken.jsonl"], "--data broken.jsonl cannot be read: JSON parse error"),
    (["--data", "other.jsonl"], "--task sft over records of txt: KeyError('text')"),
    (["--data", "null.jsonl"], "--task sft over records of text: AttributeError"),
    (["--eval_data", "nofile"], "--eval_data nofile cannot be read: Couldn't find any data file"),
    (["--report_to", "wandb"], "WandbCallback requires wandb to be installed"),
    (["--output_dir", "/proc/none/out"], "--output_dir /proc/none/out"),
    (["--resume_from_checkpoint", "none"], "--resume_from_checkpoint none: it holds no trainer_state.json"),
    (["--tp", "3"], "--tp, --pp, --sp, --ep: world_size (2) is not divisible by 3"),
    (["--model", "none"], "--model none: there is no "),
    (["--model", "model", "--tp", "3", "--ranks", "3"], "--model model: "),
    (["--learning_rat", "1"], "not used by the HfArgumentParser: ['--learning_rat', '1']"),
    (["--packing", "--model", "tiny:bloom"], "models of type 'bloom' do not keep packed records apart"),
    (["--keep_best"], "didn't pass an `eval_dataset`"),
    (["--bf16", "true"], "TrainingArguments(bf16=True) with a plugin: give the plugin precision='bf16'"),
    (["--load_in_4bit"], "--load_in_4bit: weights of 4 bits are not split"),
    (["--use_peft", "--lora_target_modules", "zorp"], "Target modules zorp not found"),
    (["--task", "reward", "--data", "pairs.jsonl", "--pp", "2"], "RewardTrainer.compute_loss with pp_size=2"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=lambda each: " ".join(each) if isinstance(each, list) else "")
@pytest.mark.parametrize("dry", [True, False])
def test_a_job_that_cannot_start_is_refused_in_one_line_before_ranks_start(
    folder: Path,
    words: list[str],
    said: str,
    dry: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A dry run said `fits` to jobs that could not start."""
    monkeypatch.chdir(folder)
    written(folder, "pairs")
    monkeypatch.setattr("core_train.main.start_ranks", lambda ranks: pytest.fail("ranks were started"))
    given = ["--model", "model", "--data", "completion.jsonl", "--max_length", "64", "--use_cpu", *words]
    given += ["--dry-run"] if dry else []
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert main(given) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and said in errors[0]


def test_a_dry_run_prints_the_plan_and_what_is_learned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    given = ["finetune", "--model", "model", "--data", "completion.jsonl", "--max_length", "64", "--use_cpu"]
    assert core_main([*given, "--tp", "2", "--use_peft", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "the first record, learned in [[ ]]: count [[bbb<|im_end|>]]" in out and "fits: rank" in out


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("messages", "<|im_start|>user\\ncount <|im_end|>\\n<|im_start|>assistant\\n[[bbb<|im_end|>]]\\n"),
        ("sharegpt", "<|im_start|>user\\ncount <|im_end|>\\n<|im_start|>assistant\\n[[bbb<|im_end|>]]\\n"),
        ("alpaca", "<|im_start|>user\\ncount <|im_end|>\\n<|im_start|>assistant\\n[[bbb<|im_end|>\\n]]"),
        ("pairs", "chosen: count [[bbb<|im_end|>]]; rejected: count [[cc<|im_end|>]]"),
        ("texts", "count bbb -> 'no'"),
    ],
)
def test_each_kind_of_record_is_read_and_shown(folder: Path, kind: str, shown: str) -> None:
    task = {"pairs": "dpo", "texts": "classification"}.get(kind, "sft")
    given = [*options(folder, task), "--data", str(written(folder, kind))]
    assert sample(check(load_config(given), 2)) == shown


@ranks(2, timeout_s=150.0)
def test_a_run_goes_on_in_another_layout_and_writes_the_best_model(
    rank: int, world: int, tmp_path: Path, folder: Path
) -> None:
    """Without a break over tp 2; with one, and the rest over two replicas: the same losses."""
    held = ["--eval_data", str(folder / "completion.jsonl"), "--keep_best", "--eval_steps", "4"]

    def run(name: str, layout: list[str], dp: int, *more: str) -> list[float]:
        with launched(rank, world):
            given = [*options(folder, "sft", *layout, dp=dp), "--output_dir", str(tmp_path / name), *more]
            return losses_of(tune(load_config(given), check_sizes(load_config(given), world)))

    whole = run("whole", ["--tp", "2"], 1, "--save_strategy", "steps", "--save_steps", "4", *held)
    at = str(tmp_path / "whole" / "checkpoint-4")
    rest = run("rest", ["--zero", "3"], 2, "--resume_from_checkpoint", at)
    assert rest == pytest.approx(whole, abs=1e-5) and whole[-1] < whole[0]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    before = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (model.lm_head.weight - before.lm_head.weight).abs().max() > 0.01
    best = json.loads((tmp_path / "whole" / "checkpoint-8" / "trainer_state.json").read_text())
    assert best["best_metric"] == min(entry["eval_loss"] for entry in best["log_history"] if "eval_loss" in entry)


def small_run(folder: Path) -> list[str]:
    """Options with paths relative to `folder`."""
    given = options(folder, "sft", "--use_peft", "--tp", "2")
    given[given.index("--model") + 1] = "model"
    given[given.index("--output_dir") + 1] = "my run"
    return [*given, "--max_steps", "2"]


@ranks(2, timeout_s=150.0)
def test_what_a_run_leaves_works_from_any_directory(rank: int, world: int, folder: Path, tmp_path: Path) -> None:
    """Adapters named their base by a path relative to the working directory, and so did the card."""
    import peft

    said, left, config = io.StringIO(), folder / "my run", load_config(small_run(folder))
    with pytest.MonkeyPatch.context() as patch, launched(rank, world), contextlib.redirect_stdout(said):
        patch.chdir(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # of names that peft and TRL use, on every rank
            tune(config, check_sizes(config, world))
    if rank > 0:
        return
    assert said.getvalue().splitlines()[-1].endswith(f"-m core generate '{left}' --chat --prompt Hello")
    assert json.loads((left / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder / "model")
    assert f'model="{left}"' in (left / "README.md").read_text()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.chdir(tmp_path)
        model = peft.AutoPeftModelForCausalLM.from_pretrained(left)
        assert any("lora_B" in name and value.abs().max() > 0 for name, value in model.state_dict().items())
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            assert generate([str(left), "--prompt", "count ", "--tokens", "3", "--temperature", "0"]) == 0
    assert text.getvalue().startswith("count ")


@pytest.mark.nightly
def test_the_command_starts_its_ranks_and_warns_of_nothing(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "core", "finetune", *small_run(folder)],
        capture_output=True,
        text=True,
        timeout=170,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Warning" not in done.stderr, "of names that peft and TRL use, on every rank"
    assert done.stdout.splitlines()[-1].endswith(f"-m core generate '{folder / 'my run'}' --chat --prompt Hello")

"""What a run leaves to go on with: a checkpoint in its directory, `latest`, validation losses, a model that writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("tyro")

from core.checkpoint import list_steps
from core_plan.job.config_file import load_config
from core_plan.job.errors import ConfigError
from core_plan.job.plan import plan_job
from core_plan.job.run_directory import RunDirectory, check_run_name
from core_train import reporter
from core_train.commands import generate
from core_train.commands.generate import continued, load_trained, tokenizer_of
from core_train.job import train
from core_train.tokens import num_windows, open_tokens, prepare_tokens, window
from tests.unit_tests.core_train.training_reference import CPU, ROOT, TINY, records_of, text_flags_in
from tests.unit_tests.ranks import run_on_ranks

SMALL = [*TINY, "--run.global-batch-size", "4", "--run.validation-windows", "6", "--logging.no-plots"]
SMALL += ["--optimizer.warmup-steps", "1", "--optimizer.lr", "1e-2"]
PADDED = ["--model.vocab-size", "257", "--model.dtype", "bfloat16"]
EXPERTS = ["--model.num-experts", "4", "--ep", "2", "--tp", "1"]


def train_and_keep(rank: int, world: int, flags: list[str]) -> None:
    config = load_config(flags)
    train(config, plan_job(config, world), CPU, prepares_data=rank == 0, keeps=True)


def run(world: int, flags: list[str], directory: Path) -> Path:
    """Train on `world` ranks; the run's directory."""
    where = ["--run.directory", str(directory), *text_flags_in(directory.parent / "tokens")]
    run_on_ranks(train_and_keep, world, {"world": world, "flags": [*SMALL, *flags, *where]})
    return directory / "tiny"


@pytest.mark.parametrize(
    ("world", "flags"),
    [(4, []), (2, ["--tp", "1", "--pp", "2"]), (2, EXPERTS), (2, PADDED)],
    ids=["tp2-dp2", "pp2", "experts-ep2", "padded-bf16"],
)
@pytest.mark.in_suite(2)
def test_the_model_that_a_run_leaves_has_its_validation_loss_on_one_process(
    world: int, flags: list[str], tmp_path: Path
) -> None:
    directory = run(world, ["--run.steps", "3", *flags], tmp_path / "runs")
    assert list_steps(directory / "checkpoints") == [3]
    assert (tmp_path / "runs" / "latest").resolve() == directory.resolve()
    trained = load_trained(tmp_path / "runs" / "latest")
    assert (trained.step, trained.tokenizer) == (3, "bytes")

    data = load_config([*SMALL, *text_flags_in(tmp_path / "tokens")]).data
    tokens = open_tokens(data, prepare_tokens(data))
    length = trained.options.sequence_length
    indices = np.linspace(0, num_windows(tokens.validation, length) - 1, 6).astype(np.int64)
    windows = torch.from_numpy(np.stack([window(tokens.validation, int(index), length) for index in indices]))
    with torch.no_grad():
        losses = trained.model(windows[:, :-1], labels=windows[:, 1:])
    summary = json.loads((directory / "summary.json").read_text())
    expected = summary["validation_loss"] * tokens.header.bytes_per_token
    bound = 5e-3 if "bfloat16" in flags else 1e-5
    assert float(losses.double().mean()) == pytest.approx(expected, rel=bound)
    assert records_of(directory)[0]["loss"] - expected > 0.3, "the weights must have moved by far more than the bound"


def test_validation_losses_on_the_way_change_no_step_and_are_those_of_a_run_that_ends_there(tmp_path: Path) -> None:
    steps = ["--run.steps", "5", "--run.validate-every"]
    saved = tmp_path / "saved"
    best = ["--checkpoint.dir", str(saved), "--checkpoint.keep-best"]
    with_them = records_of(run(2, [*steps, "2", *best], tmp_path / "with"))
    assert list_steps(saved) == list_steps(saved / "best") == [5], "the last step has the lowest loss"
    worse = ["--checkpoint.resume", "--checkpoint.schedule", "given", "--optimizer.lr", "5"]
    worse += ["--optimizer.decay", "constant"]
    run(2, ["--run.steps", "6", *best, *worse], tmp_path / "worse")
    assert list_steps(saved)[-1] == 6 and list_steps(saved / "best") == [5]
    without = records_of(run(2, [*steps, "0"], tmp_path / "without"))
    assert [record["loss"] for record in with_them] == [record["loss"] for record in without]
    assert [record["step"] for record in with_them if record["validation_loss"] is not None] == [2, 4]
    ends_there = run(2, [*steps, "100", "--run.stop-after", "4"], tmp_path / "short")
    assert json.loads((ends_there / "summary.json").read_text())["validation_loss"] == with_them[3]["validation_loss"]
    assert with_them[3]["validation_loss"] < with_them[1]["validation_loss"]


@pytest.mark.nightly
def test_the_last_lines_of_the_command_are_commands_that_continue_a_text_and_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unwanted = {"RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    where = ["--run.directory", str(tmp_path / "runs"), *text_flags_in(tmp_path / "tokens")]
    flags = [*SMALL, *where, "--tp", "1", "--run.steps", "2"]
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, "--run.ranks", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    *_, kept, last = done.stdout.splitlines()
    words = re.fullmatch(r"continue a text: \S*python\S* -m core generate (\S+)", last)
    assert words is not None, done.stdout
    assert generate.main([words[1], "--prompt", "import ", "--tokens", "9", "--temperature", "0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("import ") and len(said) > len("import \n")

    more = re.fullmatch(r"kept in \S+/; to train on, add: (.*)", kept)
    assert more is not None, done.stdout
    again = [*flags, *more[1].split(), "--run.stop-after", "3"]
    run_on_ranks(train_and_keep, 1, {"world": 1, "flags": again})
    assert [record["step"] for record in records_of(tmp_path / "runs" / "tiny")] == [1, 2, 3]


def test_a_run_that_is_configured_to_keep_nothing_keeps_nothing(tmp_path: Path) -> None:
    directory = run(1, ["--tp", "1", "--run.steps", "1", "--checkpoint.no-at-end"], tmp_path / "runs")
    assert not (directory / "checkpoints").exists()
    with pytest.raises(ConfigError, match="left no checkpoint"):
        load_trained(directory)


def test_a_run_leaves_its_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    flags = ["--tp", "1", "--run.steps", "1", "--data.tokenizer", "bpe", "--data.bpe-vocab-size", "300"]
    directory = run(1, flags, tmp_path / "runs")
    trained = load_trained(directory)
    assert trained.model.config.vocab_size == 300
    words = tokenizer_of(directory, trained)
    numbers = words.tokens_of("def step(self)")
    assert words.decode(numbers) == "def step(self)" and len(numbers) < len("def step(self)")
    assert tokenizer_of(directory / "checkpoints", trained).tokens_of("def step(self)") == numbers
    (directory / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(ConfigError, match="give --tokenizer"):
        tokenizer_of(directory, trained)
    assert tokenizer_of(directory, trained, tmp_path / "elsewhere.json").tokens_of("def step(self)") == numbers


def test_latest_leads_to_the_run_that_began_last_and_is_no_name_of_a_run(tmp_path: Path) -> None:
    for name in ("a", "b", "a"):
        with RunDirectory.new(tmp_path, name) as begun:
            (begun.path / "config.json").write_text("{}")
            begun.link_latest()
            assert (tmp_path / "latest").resolve() == begun.path.resolve()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "a-2", "latest"}
    with pytest.raises(ConfigError, match="'latest'"):
        check_run_name("latest")


# --- drawing tokens ----------------------------------------------------------------------------------------------

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, 9.0])  # the last one is padding


def always_the_same(tokens: Tensor) -> Tensor:
    return LOGITS.expand(tokens.shape[1], 1, 5)


def drawn(count: int, **options: float) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return list(continued(always_the_same, [0], count, length=4, vocab_size=4, generator=generator, **options))  # type: ignore[arg-type]


def test_greedy_takes_the_most_probable_and_never_padding() -> None:
    assert drawn(5, temperature=0) == [1] * 5


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (2.0, None), (0.5, None), (1.0, 2), (2.0, 3)])
def test_tokens_are_drawn_as_often_as_their_probabilities_say(temperature: float, top_k: int | None) -> None:
    weights = [2.718281828 ** (value / temperature) for value in (1.0, 3.0, 2.0, 0.0)]
    order = sorted(range(4), key=lambda token: -weights[token])
    kept = [weight if token in order[: top_k or 4] else 0.0 for token, weight in enumerate(weights)]
    expected = [weight / sum(kept) for weight in kept]
    counts = np.bincount(drawn(4000, temperature=temperature, top_k=top_k), minlength=4) / 4000  # type: ignore[arg-type]
    assert counts == pytest.approx(expected, abs=0.03)
    assert all(count == 0 for count, share in zip(counts, expected, strict=True) if share == 0)


def test_the_model_sees_the_last_tokens_and_the_text_ends_before_the_end_mark() -> None:
    seen: list[list[int]] = []

    def counts_up(tokens: Tensor) -> Tensor:
        seen.append(tokens[0].tolist())
        return torch.nn.functional.one_hot(tokens + 1, 10).float().transpose(0, 1)

    made = list(continued(counts_up, [1, 2], 20, length=3, vocab_size=10, temperature=0, end=6))
    assert made == [3, 4, 5]
    assert seen == [[1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_the_last_line_names_the_interpreter_that_has_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    monkeypatch.setenv("PATH", str(binaries))
    assert reporter.python_command() == "python"
    monkeypatch.setenv("PATH", "/nowhere")
    assert reporter.python_command() == str(binaries / "python")
    monkeypatch.chdir(tmp_path)
    assert reporter.python_command() == ".venv/bin/python"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "is no directory"),
        (["."], "no checkpoint"),
        ([".", "--tokens", "0"], "--tokens is 0"),
        ([".", "--max-new-tokens", "0"], "--tokens is 0"),  # as transformers calls it
        ([".", "--temperature", "nan"], "--temperature is nan"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = generate.main(arguments)
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2 and words in capsys.readouterr().err

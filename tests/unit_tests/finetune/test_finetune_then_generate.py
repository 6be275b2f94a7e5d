"""The command after fine-tuning: generate from what it has left, and make one directory of it.

transformers' and peft's own loading and greedy search are the reference.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("tyro")

import peft
import transformers
from safetensors.torch import load_file, save_file

from core.checkpoint.weights.one_file import save_torch
from core.finetune.model import check_model, directory_of
from core.jobs import convert, generate
from tests.unit_tests.finetune.test_finetune_job import config_in, tuned
from tests.unit_tests.ranks import as_torchrun_starts, ranks

UP = "model.layers.1.mlp.up_proj.weight"
PROMPT, TOKENS = "count aaa", 9
GREEDY = ["--prompt", PROMPT, "--tokens", str(TOKENS), "--temperature", "0"]


def answer_of(model: Any, tokenizer: Any, chat: bool) -> str:
    """The text that `core.generate` shall print."""
    text = PROMPT
    if chat:
        messages = [{"role": "user", "content": PROMPT}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    given = tokenizer(text, return_tensors="pt")
    found = model.generate(**given, max_new_tokens=TOKENS, do_sample=False)[0]
    shown = found[given["input_ids"].shape[1] :] if chat else found
    return str(tokenizer.decode(shown, skip_special_tokens=True))


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert generate.main([*map(str, arguments), *GREEDY]) == 0
    return capsys.readouterr().out.rstrip("\n")


@ranks(2, timeout_s=150.0)
def train(rank: int, world: int, folder: Path, flags: list[str]) -> None:
    tuned(config_in(folder, "--run.steps", "25", "--run.micro-batch-size", "1", *flags), rank, world)


def trained(folder: Path, *flags: str) -> Path:
    """The directory of a run over two ranks."""
    train(world=2, folder=folder, flags=list(flags))
    return folder / "runs" / "finetune"


def test_a_run_its_model_and_its_checkpoint_continue_a_text_and_answer_a_chat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, "--tp", "2")
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    text, chat = (answer_of(model, tokenizer, chat) for chat in (False, True))
    assert text != PROMPT and chat.strip("b") == ""  # it has learned to answer with that letter
    for place in (run, run / "model", run / "checkpoints"):
        assert printed(capsys, place) == text, place
        assert printed(capsys, place, "--chat") == chat, place
    assert printed(capsys, run, "--step", 25) == text
    assert generate.main([str(run / "model"), "--step", "25"]) == 2
    assert "is a model of transformers" in capsys.readouterr().err
    for source in (run, run / "checkpoints"):
        target = tmp_path / f"out-{source.name}"
        assert convert.main([str(source), str(target)]) == 0
        again = transformers.AutoModelForCausalLM.from_pretrained(target)
        assert all(map(torch.equal, again.parameters(), model.parameters()))
        assert printed(capsys, target) == text


def test_a_directory_without_a_tokenizer_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert generate.main([str(tmp_path), "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert f"the tokenizer of {tmp_path} knows" in error
    assert "makes none of 'a'; put the model's tokenizer.json" in error


def leave_out(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    weights.pop(UP)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def round_off(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    weights[UP] = (weights[UP] * 100).to(torch.int8)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def round_off_in_torch_file(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    weights[UP] = (weights[UP] * 100).to(torch.int8)
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")


def flip_in_torch_file(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    (directory / "model.safetensors").unlink()
    file = directory / "pytorch_model.bin"
    save_torch(file, weights)
    content = bytearray(file.read_bytes())
    content[content.find(weights[UP].numpy().tobytes()) + 3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (leave_out, f"lack 1 of the model's weights, the first '{UP}'"),
        (round_off, f"'{UP}' is I8 in its file"),
        (round_off_in_torch_file, f"'{UP}' is int8 in its file"),
        (flip_in_torch_file, "pytorch_model.bin has other bytes than were saved"),
    ],
)
def test_a_directory_without_the_weights_that_were_saved_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[..., None], words: str
) -> None:
    """Transformers draws at random what is missing, takes whole numbers, and compares no checksum."""
    config = config_in(tmp_path)
    check_model(config)
    directory = directory_of(config)
    damage(directory, load_file(directory / "model.safetensors"))
    assert generate.main([str(directory), *GREEDY]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "MISSING" not in error


def test_an_adapter_answers_on_its_base_and_is_merged_into_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, "--lora.r", "4")
    base = transformers.AutoModelForCausalLM.from_pretrained(directory_of(config_in(tmp_path)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    before = answer_of(base, tokenizer, chat=False)
    model = peft.PeftModel.from_pretrained(base, run / "model").eval()
    text = answer_of(model, tokenizer, chat=False)
    assert text != before
    for place in (run, run / "model", run / "checkpoints"):
        assert printed(capsys, place) == text, place
    assert generate.main([str(run), "--tp", "2"]) == 2
    assert "python -m core.convert, which merges adapters" in capsys.readouterr().err
    whole = model.merge_and_unload()
    for source in (run / "model", run / "checkpoints"):
        target = tmp_path / f"out-{source.name}"
        assert convert.main([str(source), str(target)]) == 0
        again = transformers.AutoModelForCausalLM.from_pretrained(target)
        for name, param in whole.named_parameters():
            torch.testing.assert_close(again.get_parameter(name), param, rtol=0, atol=1e-6)
    (run / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "gone", "peft_type": "LORA"}')
    assert generate.main([str(run), *GREEDY]) == 2
    assert "names the base model 'gone', which is no model's directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "how",
    [
        "--tp 2 --model.dtype bfloat16 --model tiny:gemma3",  # its embeddings are tied
        pytest.param("--pp 2 --zero 2", marks=pytest.mark.nightly),
        pytest.param("--plugin torch_fsdp", marks=pytest.mark.nightly),
    ],
)
def test_a_merged_model_is_a_plain_directory_and_its_adapter_lies_next_to_it(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*how.split(), "--lora.r", "4", "--lora.alpha", "8", "--run.steps", "6"]
    stale = tmp_path / "runs" / "finetune" / "model"  # as a run that was stopped without --lora.merge leaves
    stale.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (stale / name).write_text("{}")
    run = trained(tmp_path, *flags, "--lora.merge")
    base = directory_of(config_in(tmp_path, *flags))
    dtype = torch.bfloat16 if "bfloat16" in how else torch.float32
    before = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    again = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    assert type(again) is type(before) and again.dtype == dtype  # a plain model, without peft
    assert not (run / "model" / "adapter_config.json").exists()
    factors = load_file(run / "adapter" / "adapter_model.safetensors")
    changed = 0
    for name, param in before.named_parameters():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = param.detach()
        if f"{module}.lora_B.weight" in factors:
            added = 2 * factors[f"{module}.lora_B.weight"].double() @ factors[f"{module}.lora_A.weight"].double()
            assert added.abs().max() > 1e-3
            expected, changed = expected.double() + added, changed + 1
        rounding = 2**-7 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(again.get_parameter(name).double(), expected.double(), rtol=rounding, atol=1e-4)
    assert changed == 4 * 7
    whole = peft.PeftModel.from_pretrained(before, run / "adapter").merge_and_unload()
    assert all(map(torch.equal, again.parameters(), whole.parameters()))
    written = json.loads((base / "config.json").read_text())
    assert json.loads((run / "model" / "config.json").read_text()) == written | {"dtype": str(dtype)[6:]}
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    assert printed(capsys, run) == answer_of(again.eval(), tokenizer, chat=False)


@ranks(2)
def generate_on_ranks(rank: int, world: int, model: Path, folder: Path) -> None:
    shown = io.StringIO()
    with as_torchrun_starts(rank, world), contextlib.redirect_stdout(shown):
        assert generate.main([str(model), *GREEDY, "--tp", "2"]) == 0
    (folder / f"shown-{rank}").write_text(shown.getvalue())


def test_two_ranks_share_a_model_and_one_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = directory_of(config_in(tmp_path))
    check_model(config_in(tmp_path))
    generate_on_ranks(world=2, model=model, folder=tmp_path)
    assert (tmp_path / "shown-0").read_text().rstrip("\n") == printed(capsys, model)
    assert (tmp_path / "shown-1").read_text() == ""


@pytest.mark.parametrize("status", [0, 3])
def test_a_plain_start_with_tp_starts_as_many_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    check_model(config_in(tmp_path))
    started: list[int] = []
    monkeypatch.setattr(generate, "start_ranks", lambda count: started.append(count) or status)
    assert generate.main([str(directory_of(config_in(tmp_path))), *GREEDY, "--tp", "2"]) == status
    assert started == [2]


@pytest.mark.nightly
def test_the_command_starts_its_own_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = directory_of(config_in(tmp_path))
    check_model(config_in(tmp_path))
    generate_from = [sys.executable, "-m", "core.generate", str(model), *GREEDY, "--tp", "2"]
    done = subprocess.run(generate_from, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == printed(capsys, model)

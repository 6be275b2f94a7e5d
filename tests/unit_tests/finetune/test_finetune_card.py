"""The model card says what the run was, and programs of transformers and peft alone load what it lies next to."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("tyro")

from core.finetune.card import options_as_toml
from core.finetune.config import load_config
from core.finetune.model_files import drop_merged
from core.finetune.windows import open_windows
from tests.unit_tests.finetune.test_finetune_job import config_in
from tests.unit_tests.finetune.test_finetune_then_generate import trained

# A program of someone who has never heard of core: it runs where core cannot be imported.
THEIRS = """
import json, os, sys
sys.modules["core"] = None
for directory, loads in json.loads(sys.argv[1]).items():
    os.chdir(directory)
    names = {}
    exec(loads, names)
    prompt = names["tokenizer"].apply_chat_template(
        [{"role": "user", "content": "count aaa"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = names["model"].generate(**prompt, max_new_tokens=9, do_sample=False)[0, prompt["input_ids"].shape[1]:]
    answer = names["tokenizer"].decode(found, skip_special_tokens=True)
    print(json.dumps([type(names["model"]).__name__, answer]))
"""


def code_of(card: str, language: str) -> str:
    return str(re.search(rf"```{language}\n(.*?)```", card, re.DOTALL)[1])  # type: ignore[index]


def answered(*directories: Path) -> list[list[str]]:
    """What the code of each card gives, run in its directory: [the model's class, an answer]."""
    loads = {str(directory): code_of((directory / "README.md").read_text(), "python") for directory in directories}
    alone = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *alone, "-c", THEIRS, json.dumps(loads)]
    done = subprocess.run(command, cwd=directories[0], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(directories) :]]


def test_the_code_on_a_card_loads_model_and_adapter_without_this_package(tmp_path: Path) -> None:
    flags = ["--tp", "2", "--lora.r", "8", "--lora.merge", "--optimizer.lr", "2e-2"]
    run = trained(tmp_path, *flags)
    kinds, answers = zip(*answered(run / "model", run / "adapter"), strict=True)
    assert kinds == ("Qwen3ForCausalLM", "PeftModelForCausalLM")
    assert answers[0] == answers[1] and answers[0].strip("b") == "" != answers[0]  # as the data answers

    config = config_in(tmp_path, "--run.steps", "25", "--run.micro-batch-size", "1", *flags)
    header = open_windows(next(config.data.cache.glob("windows-*"))).header
    log = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    validation = json.loads((run / "summary.json").read_text())["validation_loss"]
    for name in ("model", "adapter"):
        card = (run / name / "README.md").read_text()
        assert f"`{header.digest}`" in card and f"{header.learned:,} of them learned" in card
        assert f"| training, step 1 | {log[0]['loss']:.4f} |" in card
        assert f"| training, step 25 | {log[-1]['loss']:.4f} |" in card
        assert f"| validation, after step 25 | {validation:.4f} |" in card
        assert f"library_name: {'peft' if name == 'adapter' else 'transformers'}\n" in card
        assert "base_model:" not in card  # a path is no model on the Hub
        again = tmp_path / "again.toml"
        again.write_text(code_of(card, "toml"))
        read = load_config(["--config", str(again)])
        assert read == config


def test_every_kind_of_option_is_read_again_as_it_was(tmp_path: Path) -> None:
    words = "--data a.jsonl --data é.parquet --data.weights 2 0.5 --data.no-packing --optimizer.lr 1e-07 --zero 0"
    words += " --lora.r 2 --lora.targets q_proj v_proj --run.name x --optimizer.weight-decay 0 --keep-best"
    config = load_config(words.split())
    text = options_as_toml(config)
    assert "weights = [2.0, 0.5]" in text and 'file = ["a.jsonl", "é.parquet"]' in text and "lr = 1e-07" in text
    (tmp_path / "again.toml").write_text(text)
    assert load_config(["--config", str(tmp_path / "again.toml")]) == config


def test_an_adapter_takes_the_place_of_a_merged_model(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "model-00001-of-2.safetensors"):
        (tmp_path / name).write_text("{}")
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    drop_merged(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors", "tokenizer.json")
    }

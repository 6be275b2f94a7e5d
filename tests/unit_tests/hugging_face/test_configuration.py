"""A configuration that asks for more layers than are ever built is refused before anything is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from core.finetune.config import load_config
from core.finetune.model import check_model
from core.hugging_face.__main__ import main as check_family
from core.hugging_face.checkpoint import load_split
from core.hugging_face.configuration import read_configuration
from core.jobs import convert
from core.plan.command import main as plan
from core.training.errors import ConfigError

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_attention_heads": 2}
WORDS = "its configuration says num_hidden_layers 1000000000000; expected 1 to 65,536"


@pytest.fixture
def endless(tmp_path: Path) -> str:
    """A directory whose config.json asks for more layers than any machine can count."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 10**12}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model_type": "qwen3", "num_hidden_layers": 65_537}, "num_hidden_layers 65537"),
        ({"model_type": "qwen3", "num_hidden_layers": 1e12}, "num_hidden_layers 1000000000000.0"),
        ({"model_type": "gpt2", "n_layer": 10**12}, "n_layer 1000000000000"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**12}}, "num_hidden_layers 1000000000000"),
        ({"model_type": "gemma3", "vision_config": {"num_hidden_layers": 10**12}}, "num_hidden_layers 1000000000000"),
        ({"model_type": "whisper", "encoder_layers": 10**12}, "encoder_layers 1000000000000"),
    ],
)
def test_more_layers_than_are_built_are_refused_by_their_name(
    content: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    for place in (file, tmp_path):
        with pytest.raises(ValueError, match=f"its configuration says {words}; expected 1 to 65,536"):
            read_configuration(place)


def test_as_many_layers_as_are_built_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 65_536}))
    assert read_configuration(tmp_path).num_hidden_layers == 65_536


@pytest.mark.parametrize("more", [[], ["--advise"]])
def test_a_plan_refuses_before_it_builds(more: list[str], endless: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(["--model", endless, "--ranks", "1", "--seq", "32", *more]) == 2
    assert capsys.readouterr().err == f"error: --model {endless}: {WORDS}\n"


@pytest.mark.parametrize("more", [[], ["--advise"]])
def test_a_plan_refuses_a_model_without_layers_before_it_builds(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", None)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 0}))
    assert plan(["--model", str(tmp_path), "--ranks", "1", "--seq", "32", *more]) == 2
    assert "says num_hidden_layers 0; expected 1 to 65,536" in capsys.readouterr().err


def test_fine_tuning_refuses_before_it_builds(endless: str) -> None:
    with pytest.raises(ConfigError, match=f"--model.path .*: {WORDS}"):
        check_model(load_config(["--model.path", endless]))


def test_loading_refuses_before_it_builds(endless: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=WORDS):
        load_split(endless)
    assert convert.main([endless, f"{endless}/new"]) == 2
    assert check_family(["check", endless]) == 2
    assert capsys.readouterr().err == f"error: {WORDS}\n{WORDS}\n"

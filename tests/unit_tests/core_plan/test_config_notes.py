"""What a plan says of a config.json that it does not follow, and that it says nothing of files as they are found."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from core.hugging_face.read.tiny import tiny_of_bytes
from core_plan import ModelRun
from core_plan.command import main

LLAMA = {
    "model_type": "llama",
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 512},
}


def notes_of(content: dict[str, Any], folder: Path) -> list[str]:
    (folder / "config.json").write_text(json.dumps(content))
    return list(ModelRun(str(folder)).notes)


def renamed(old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in LLAMA.items()}


def test_a_misspelt_key_is_named_with_the_one_that_is_meant_and_what_is_taken(tmp_path: Path) -> None:
    assert notes_of(LLAMA, tmp_path) == []
    assert notes_of(renamed("num_hidden_layers", "num_hidden_layer"), tmp_path) == [
        "config.json has keys that LlamaConfig does not know, which are not counted: num_hidden_layer (is it "
        "num_hidden_layers?)",
        "config.json does not say num_hidden_layers (32); this is what LlamaConfig has by default",
    ]
    assert notes_of(renamed("num_key_value_heads", "kv_groups") | {"kv_groups": 3}, tmp_path) == [
        "config.json has keys that LlamaConfig does not know, which are not counted: kv_groups",
    ]


def test_keys_of_a_model_inside_a_model_are_looked_at(tmp_path: Path) -> None:
    content = {"model_type": "gemma3", "text_config": json.loads(tiny_of_bytes("gemma3", 64).to_json_string())}
    assert notes_of(content, tmp_path) == []
    content["text_config"]["intermediate_sise"] = content["text_config"].pop("intermediate_size")
    (note,) = notes_of(content, tmp_path)
    assert note.endswith("not counted: text_config.intermediate_sise (is it intermediate_size?)")


def test_quantization_is_not_planned_and_said_so(tmp_path: Path) -> None:
    (note,) = notes_of({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}, tmp_path)
    assert note.startswith("quantization_config is not planned")


@pytest.mark.parametrize(
    ("family", "strays"),
    [
        ("llama", {"rope_theta": 500000, "rope_scaling": None, "pretraining_tp": 1, "torch_dtype": "bfloat16"}),
        ("llama", {"auto_map": {"AutoModel": "a.B"}, "_name_or_path": "x", "max_length": 77, "tokenizer_class": "T"}),
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "sliding_window_size": "as"}),
        ("gpt2", {"n_ctx": "as", "summary_type": "cls_index", "gradient_checkpointing": False}),
        ("qwen2", {"use_mrope": False, "max_window_layers": 3}),
        ("qwen3_moe", {"head_dim": 48, "rope_theta": 1000000.0}),
        ("phi3", {"attention_bias": False, "original_max_position_embeddings": 64}),
    ],
)
def test_keys_that_real_files_carry_are_no_alarm(family: str, strays: dict[str, Any], tmp_path: Path) -> None:
    """'as': the number that another key has too."""
    configuration = tiny_of_bytes(family, 64)
    content = json.loads(configuration.to_json_string())
    same = content.get("sliding_window") or content.get("n_positions")
    given = {key: same if value == "as" else value for key, value in strays.items()}
    assert notes_of({**content, **given}, tmp_path) == []


def test_plans_and_advice_begin_with_what_they_do_not_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes_of({**LLAMA, "intermediate_sise": 500}, tmp_path)
    flags = ["--model", str(tmp_path), "--ranks", "1", "--global-batch", "1", "--seq", "64"]
    for more in ([], ["--advise"]):
        assert main([*flags, *more]) == 0
        assert capsys.readouterr().out.startswith("config.json has keys that LlamaConfig does not know")

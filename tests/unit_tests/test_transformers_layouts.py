"""Our GPT under the names of Hugging Face's transformers: equal logits there and back, and refusals by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import transformers

from core.checkpoint import save_checkpoint
from core.models.gpt import GPTModel
from core.models.transformers_layouts import (
    config_for_transformers,
    config_from_transformers,
    from_transformers,
    layout_of,
    to_transformers,
)
from core.transformer import TransformerConfig
from core_train.commands import convert
from core_train.commands.generate import load_trained

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 67}
SIZES |= {"max_sequence_length": 24, "ffn_hidden_size": 48}
GPT2: dict[str, Any] = {
    "normalization": "LayerNorm",
    "activation": "gelu",
    "position_embedding_type": "learned_absolute",
}
LLAMA: dict[str, Any] = {"normalization": "RMSNorm", "activation": "swiglu", "position_embedding_type": "rope"}
PLAIN, UNTIED = {"add_bias_linear": False}, {"share_embeddings_and_output_weights": False}
CONFIGS = {
    "gpt2": TransformerConfig(**SIZES, **GPT2),
    "gpt2-untied": TransformerConfig(**SIZES, **GPT2, **UNTIED, layernorm_epsilon=1e-3),
    "llama": TransformerConfig(**SIZES, **LLAMA, **PLAIN, **UNTIED, rotary_base=500.0),
    "llama-groups-bias": TransformerConfig(**SIZES, **LLAMA, num_query_groups=2, layernorm_epsilon=1e-3),
    "llama-wide-heads": TransformerConfig(**SIZES, **LLAMA, **PLAIN, kv_channels=16, num_query_groups=1),
    "arcee": TransformerConfig(**SIZES, **(LLAMA | {"activation": "gelu"}), **PLAIN),
}


def random_model(config: TransformerConfig) -> GPTModel:
    """Every parameter drawn, also biases and norms, so that none could be left out or exchanged unseen."""
    model = GPTModel(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def tokens() -> Tensor:
    return torch.randint(67, (2, 24), generator=torch.Generator().manual_seed(4))


def logits_of(model: GPTModel) -> Tensor:
    with torch.no_grad():
        return model(tokens()).transpose(0, 1)


def assert_equal_logits(ours: GPTModel, theirs: Any) -> None:
    with torch.no_grad():
        expected = theirs.eval()(tokens()).logits
    assert expected.std() > 0.2
    torch.testing.assert_close(logits_of(ours), expected, atol=2e-4, rtol=1e-4)


def theirs_of(config: dict[str, Any]) -> Any:
    kinds = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config["model_type"], **kinds)
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_equal_there_and_back(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    assert name.startswith(layout_of(config))
    ours = random_model(config)
    theirs = theirs_of(config_for_transformers(config))
    theirs.load_state_dict(to_transformers(config, ours.state_dict()), strict=False)
    if config.share_embeddings_and_output_weights:
        theirs.tie_weights()
    assert_equal_logits(ours, theirs)

    back_config = config_from_transformers(json.loads(theirs.config.to_json_string(use_diff=False)))
    for field in (*SIZES, *GPT2, *UNTIED, "layernorm_epsilon", "rotary_base", "add_bias_linear", "head_size"):
        assert getattr(back_config, field) == getattr(config, field), field
    back = GPTModel(back_config)
    back.load_state_dict(from_transformers(back_config, theirs.state_dict()))
    for name_, parameter in ours.named_parameters():
        assert torch.equal(back.state_dict()[name_], parameter), name_


def save_run(model: GPTModel, place: Path) -> None:
    options = dataclasses.asdict(convert.options_for(model.config))
    save_checkpoint(place / "checkpoints", 7, [model], configuration={"model": options})


@pytest.mark.parametrize("name", ["gpt2", "llama-groups-bias-defaults", "arcee"])
def test_the_command_writes_what_from_pretrained_loads_and_reads_what_save_pretrained_writes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grouped = TransformerConfig(**SIZES, **LLAMA, num_query_groups=2)
    ours = random_model(CONFIGS.get(name, grouped))
    save_run(ours, tmp_path / "run")
    arguments = [str(tmp_path / "run"), str(tmp_path / "there"), "--max-shard-size", "20KB"]
    assert convert.main(arguments) == 0, capsys.readouterr().err
    assert len(list((tmp_path / "there").glob("*.safetensors"))) > 1
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "there", output_loading_info=True, dtype="auto"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert_equal_logits(ours, theirs)

    theirs.save_pretrained(tmp_path / "saved")
    assert convert.main([str(tmp_path / "saved"), str(tmp_path / "back")]) == 0, capsys.readouterr().err
    assert torch.equal(logits_of(load_trained(tmp_path / "back").model), logits_of(ours))
    assert convert.main(arguments) == 2 and "exists" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpt2", "arcee"])
def test_an_output_layer_of_its_own_is_brought_in_though_the_config_says_tied(name: str, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIGS[name], share_embeddings_and_output_weights=False)
    theirs_of(config_for_transformers(config)).save_pretrained(tmp_path / "there")
    entries = json.loads((tmp_path / "there" / "config.json").read_text())
    (tmp_path / "there" / "config.json").write_text(json.dumps(entries | {"tie_word_embeddings": True}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    with pytest.warns(UserWarning, match="different values"):
        assert convert.main([str(tmp_path / "there"), str(tmp_path / "run")]) == 0
    model = load_trained(tmp_path / "run").model
    assert torch.equal(model.state_dict()["output_layer.weight"], theirs.lm_head.weight)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), theirs.eval()(tokens()).logits, atol=1e-5, rtol=1e-4)


MOE = {"num_moe_experts": 4, "moe_router_topk": 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (GPT2 | MOE, "num_moe_experts is 4"),
        (LLAMA | {"qk_layernorm": True}, "qk_layernorm"),
        (GPT2 | PLAIN, "add_bias_linear is False"),
        (GPT2 | {"num_query_groups": 2}, "num_query_groups is 2 with 4 heads"),
        (GPT2 | {"kv_channels": 16}, "kv_channels is 16"),
        (GPT2 | {"position_embedding_type": "rope"}, "position_embedding_type rope are together in no layout"),
    ],
)
def test_an_option_without_a_counterpart_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_for_transformers(TransformerConfig(**SIZES, **options))


@pytest.mark.parametrize(
    ("name", "entries", "words"),
    [
        ("gpt2", {"activation_function": "gelu_new"}, "activation_function is 'gelu_new'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "type 'llama3'"),
        ("arcee", {"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
        ("arcee", {"model_type": "mamba"}, "model_type is 'mamba'"),
        ("arcee", {"dtype": "float8"}, "dtype is 'float8'"),
    ],
)
def test_an_entry_without_a_counterpart_is_refused_by_name(name: str, entries: dict[str, Any], words: str) -> None:
    theirs = config_for_transformers(CONFIGS[name]) | entries
    with pytest.raises(ValueError, match=words):
        config_from_transformers(theirs)


def test_what_the_main_job_has_no_option_for_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs_of(config_for_transformers(CONFIGS["llama"])).save_pretrained(tmp_path / "there")
    assert convert.main([str(tmp_path / "there"), str(tmp_path / "back")]) == 2
    assert "rotary_base is 500.0; the main job's GPT has 10000.0" in capsys.readouterr().err


def test_weights_of_another_model_are_refused_by_name() -> None:
    state = random_model(CONFIGS["arcee"]).state_dict()
    del state["decoder.layers.1.mlp.linear_fc1.weight"]
    with pytest.raises(ValueError, match=r"lacks decoder\.layers\.1\.mlp\.linear_fc1\.weight"):
        to_transformers(CONFIGS["arcee"], state)

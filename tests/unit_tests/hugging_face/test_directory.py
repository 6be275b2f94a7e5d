"""A directory of another program is looked at before anything is built of it: through every door, on every rank."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from core import parallel_state
from core.booster import Booster
from core.hugging_face.checkpoint import load_split
from core.hugging_face.cut_model import Cutting
from core.hugging_face.read.directory import read_configuration
from core_plan.command import main as plan
from core_plan.job.errors import ConfigError
from core_train.commands import convert
from core_train.finetune.arguments import Arguments, load_config, read_arguments
from core_train.finetune.main import check_model, load_tokenizer
from tests.families.__main__ import main as check_family
from tests.unit_tests.hugging_face.models import small
from tests.unit_tests.ranks import ranks

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


def tuned(directory: Path | str) -> Arguments:
    """A fine-tuning job that begins from a directory."""
    pytest.importorskip("trl")
    config = load_config(["--model", str(directory), "--data", "none.jsonl", "--max_length", "8"])
    return read_arguments(config.options, config.words)


def judge(directory: Path | str) -> None:
    check_model(tuned(directory), Cutting())


def test_fine_tuning_refuses_before_it_builds(endless: str) -> None:
    with pytest.raises(ConfigError, match=f"--model .*: {WORDS}"):
        judge(endless)


def test_loading_refuses_before_it_builds(endless: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=WORDS):
        load_split(endless)
    assert convert.main([endless, f"{endless}/new"]) == 2
    assert check_family(["check", endless]) == 2
    assert capsys.readouterr().err == f"error: {WORDS}\n{WORDS}\n"


def test_what_is_no_configuration_is_refused_in_a_line_by_each_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content, words in [
        ("[1]", "expected a JSON object, got [1]"),
        ("5", "expected a JSON object, got 5"),
        ("null", "expected a JSON object, got None"),
        ("{", "is no JSON: "),
        ('{"model_type": ["llama"]}', "model_type ['llama']; expected a family's name"),
    ]:
        (tmp_path / "config.json").write_text(content)
        assert convert.main([str(tmp_path), str(tmp_path / "new")]) == 2
        assert check_family(["check", str(tmp_path)]) == 2
        assert plan(["--model", str(tmp_path), "--ranks", "1", "--seq", "32"]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 3 and all(words in error for error in errors), errors
        with pytest.raises(ConfigError, match=re.escape(words)):
            judge(tmp_path)
        with pytest.raises(ValueError, match=re.escape(words)):
            load_split(tmp_path)


def test_code_in_a_directory_is_not_run_and_no_one_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would ask on the terminal, on every rank."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')")
    entries = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_its_own", "auto_map": entries}))
    words = r"no family 'of_its_own'.*loads code from its directory.*load_split\(..., trust_remote_code=True\)"
    with pytest.raises(ConfigError, match=words):
        judge(tmp_path)
    with pytest.raises(ValueError, match=words):
        load_split(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": [None, "code.Words"]}}))
    with pytest.raises(ConfigError, match="tokenizer cannot be read"):
        load_tokenizer(tuned(tmp_path))
    assert not (tmp_path / "it ran").exists()


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "of_its_own"
class Model(LlamaForCausalLM):
    config_class = Config
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + 1
        return output
"""


@ranks(2)
@pytest.mark.parametrize("architectures", [["Model"], None])
def test_code_of_a_directory_that_is_trusted_is_split(
    rank: int, world: int, architectures: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / f"modules{rank}"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    whole = transformers.LlamaForCausalLM(config)
    if rank == 0:
        whole.save_pretrained(tmp_path / "model")
        (tmp_path / "model" / "code.py").write_text(CODE)
        entries = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
        content = json.loads((tmp_path / "model" / "config.json").read_text())
        content |= {"model_type": "of_its_own", "auto_map": entries, "architectures": architectures}
        (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    torch.distributed.barrier()
    ids = torch.arange(12).view(2, 6)
    model = load_split(tmp_path / "model", trust_remote_code=True)
    assert type(model).__name__ == "Model" and model.lm_head.weight.shape[0] == 16
    torch.testing.assert_close(model(ids).logits, whole(ids).logits + 1)


def test_a_file_that_is_no_tokenizer_is_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    (tmp_path / "secret").write_text('{"password": "x"}')
    (tmp_path / "model" / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="holds no tokenizer, .*; it is not copied"):
        convert.tokenizer_in(tmp_path / "model")


def test_whole_numbers_are_not_taken_for_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    small("llama", torch.float32, head_dim=4).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"up_proj.weight' is I8 in the files"):
        load_split(tmp_path)
    with pytest.raises(ConfigError, match=r"up_proj.weight' is I8 in its file"):
        judge(tmp_path)
    assert convert.main([str(tmp_path), str(tmp_path / "new")]) == 2
    assert "is torch.int8 in its files" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def put(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    shutil.copyfile(source, target)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def rename_in_index(folder: Path, name: str) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {key: name if "00001" in file else file for key, file in content["weight_map"].items()}
    content["metadata"] = {}  # as other programs write it
    index.write_text(json.dumps(content))


def replace_by_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped": (lambda at: flip(at / "model-00002.safetensors"), "00002.safetensors has other bytes than were saved"),
    "twice": (
        lambda at: put(at / "model-00001.safetensors", at / "model-00002.safetensors"),
        "00002.safetensors is not the file that .* was saved with",
    ),
    "cut": (lambda at: os.truncate(at / "model-00001.safetensors", 100), "model-00001.safetensors is"),
    "outside": (lambda at: rename_in_index(at, "../other.safetensors"), "'../other.safetensors' is no name of a file"),
    "absolute": (lambda at: rename_in_index(at, "/etc/x.safetensors"), "'/etc/x.safetensors' is no name of a file"),
    "swapped": (lambda at: rename_in_index(at, "model-00002.safetensors"), "lacks .* tensors that the index names"),
    "fifo": (lambda at: replace_by_fifo(at / "model-00001.safetensors"), "00001.safetensors is no regular file"),
    "fifo config": (lambda at: replace_by_fifo(at / "config.json"), "config.json is no regular file"),
    "missing": (lambda at: (at / "model-00003.safetensors").unlink(), "00003.safetensors'., which are not files"),
    "adapters": (
        lambda at: (at / "adapter_config.json").write_text('{"base_model_name_or_path": "other"}'),
        "is a directory of adapters .*base model 'other'; .*add_lora",
    ),
}


@ranks(2)
def test_files_that_are_not_those_that_were_saved_are_refused_on_every_rank(
    rank: int, world: int, tmp_path: Path
) -> None:
    """The Booster has saved them. Each rank has a directory of its own, and rank 1's is bad."""
    torch.manual_seed(0)
    whole = small("llama")
    good, bad = tmp_path / f"good {rank}", tmp_path / f"bad {rank}"
    Booster(device="cpu").save_model(whole, good, shard=True, size_per_shard=0.02, use_safetensors=True)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    assert torch.equal(load_split(good).model.norm.weight, whole.model.norm.weight)
    for name, (damage, words) in FAULTS.items():
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        if rank == 1 or name == "flipped":  # one of the ranks compares the checksum of a file
            damage(bad)
        expected = words if rank == 1 or name == "flipped" else f"rank 1 failed: .*{words}"
        with pytest.raises(Exception, match=expected):
            load_split(bad)

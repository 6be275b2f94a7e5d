"""Refusals of the fine-tuning job before its ranks start, in one line, and what is right and starts."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tyro")

from core.finetune.config import load_config
from core.finetune.main import main
from core.finetune.model import check_model
from tests.unit_tests.finetune.test_finetune_job import change_config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "nowhere.jsonl"], "--data.file nowhere.jsonl is no file"),
        (["--data", "bad.jsonl"], "bad.jsonl, line 2 has the fields 'body'"),
        (["--model", "nowhere"], "--model.path nowhere is no directory; give a checkpoint directory"),
        (["--model", "bad.jsonl"], "--model.path bad.jsonl is no directory; give a checkpoint directory"),
        (["--model", "."], "--model.path . holds no config.json; give a checkpoint directory"),
        (["--lora.r", "4", "--lora.targets", "q_proj", "v_prj"], "--lora.targets v_prj: no layer has this name; there"),
        (["--lora.r", "4", "--lora.targets", "zzz"], "there is down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj"),
        (["--lora.r", "4", "--lora.targets", "mlp"], "--lora.r 4: Target module Qwen3MLP("),
        (["--lora.r", "4", "--model", "tiny:mixtral"], "--lora.r 4: the adapters are for the fused weights"),
        (["--model", "tiny:lama"], "no family with a plan or a policy is called 'lama'; is it llama"),
        (["--model", "tiny:vit"], "model type 'vit' has no causal language model"),
        (
            ["--model", "plain", "--data", "chat.jsonl", "--model.sequence-length", "64"],
            "line 1 is a chat, and the model's tokenizer has no chat template",
        ),
        (["--tp", "3", "--run.ranks", "3"], "3 tensor-parallel ranks: 'model.layers.0.self_attn.q_proj.weight'"),
        (["--tp", "2", "--run.ranks", "3"], "3 ranks are not divisible by tp 2 x sp 1 x pp 1"),
        (["--run.global-batch-size", "3"], "size 3 is not divisible by dp (world 2 / (tp 1 x pp 1) =) 2"),
        (["--run.micro-batch-size", "3"], "--run.micro-batch-size 3"),
        (["--lora.r", "0"], "--lora.r must be a whole number of at least 1"),
        (["--lora.dropout", "0.1"], "--lora.dropout and --lora.merge are of adapters; add their rank too"),
        (["--lora.merge"], "--lora.dropout and --lora.merge are of adapters; add their rank too"),
        (["--optimizer.loss-scale", "8"], "--optimizer.loss-scale is for float16"),
        (["--model.sequence-length", "1"], "--model.sequence-length must be a whole number of at least 2"),
        (["--model", "plain", "--model.sequence-length", "4096"], "4096 is longer than the model's positions, 64"),
        (["--checkpoint.resume"], "need --checkpoint.dir"),
        (
            ["--parallel.sp-mode", "split_gather"],
            "--parallel.sp-mode split_gather: sequence_parallelism_mode='split_gather'",
        ),
        (["--sp", "2", "--model.sequence-length", "66"], "66 is not divisible by what ring_attn cuts it into, 4"),
        (["--ep", "2"], "has no experts that its plan would cut"),
        (["--model", "tiny:qwen3_moe", "--ep", "8", "--run.ranks", "8"], "4 experts ('model.layers.0.mlp.experts')"),
        (["--pp", "8", "--run.ranks", "8"], "--parallel.pp 8: 4 layers"),
        (["--plugin", "gemini", "--zero", "1"], "--parallel.zero 1: --parallel.plugin gemini has 3; leave"),
        (["--plugin", "low_level_zero", "--zero", "0"], "--parallel.plugin low_level_zero has 1 or 2; leave"),
        (["--plugin", "low_level_zero", "--tp", "2"], "--parallel.plugin low_level_zero has dp only"),
        (["--plugin", "torch_ddp", "--tp", "2"], "--parallel.plugin torch_ddp has dp only"),
        (["--plugin", "torch_fsdp", "--zero", "2"], "--parallel.plugin torch_fsdp has 3; leave"),
        (["--plugin", "torch_fsdp", "--model.dtype", "bfloat16"], "torch_fsdp keeps no fp32 masters"),
        (["--plugin", "torch_ddp", "--checkpoint.dir", "kept"], "torch_ddp keeps no checkpoints to resume from"),
        (["--plugin", "torch_fsdp", "--dry-run"], "torch's own wrapper holds is not planned"),
        (["--plugin", "gemini", "--pp", "2"], "--parallel.plugin gemini has dp and tp only"),
        (
            ["--plugin", "gemini", "--tp", "2", "--parallel.sp-mode", "ring"],
            "--parallel.sp-mode ring: --parallel.plugin gemini has dp and tp only",
        ),
        (["--pp", "2", "--run.micro-batch-size", "8"], "(microbatches = --run.global-batch-size 8 / (dp 1 x micro"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_in_one_line_before_ranks_start(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from core.finetune.model import byte_tokenizer

    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("core.training.main.start_ranks", lambda _: 77)
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"body": "x"}\n')
    Path("chat.jsonl").write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n')
    if "plain" in flags:
        check_model(load_config(["--model.sequence-length", "64", "--run.directory", str(tmp_path)]))
        Path("plain").symlink_to(next(Path("tiny").iterdir()))
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = None
        Path("plain/chat_template.jinja").unlink()
        tokenizer.save_pretrained("plain")
    capsys.readouterr()
    assert main([*flags, "--logging.no-plots"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and message in said, said


def cut(file: Path, size: int) -> None:
    """Lose the end of a file, as a copy that was broken off has."""
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda model: cut(model / "config.json", 100), "config.json is no JSON"),
        (lambda model: change_config(model, model_type="other"), "has model type `other` but Transformers does not"),
        (lambda model: change_config(model, hidden_size="x"), "Validation error for field 'hidden_size'"),
        (
            lambda model: change_config(model, intermediate_size=24),
            "'model.layers.0.mlp.gate_proj.weight' has shape [128, 64] in its file, and [24, 64] by config.json",
        ),
        (
            lambda model: change_config(model, num_hidden_layers=5, layer_types=None),
            "lack 11 of the model's weights, the first 'model.layers.4.input_layernorm.weight'",
        ),
        (lambda model: (model / "model-00002-of-00003.safetensors").unlink(), "lists ['model-00002-of-00003"),
        (lambda model: cut(model / "model-00002-of-00003.safetensors", 5000), "has 5,000 bytes and is no whole saf"),
        (lambda model: cut(model / "model-00002-of-00003.safetensors", 0), "has 0 bytes and is no whole safetensors"),
        (lambda model: cut(model / "model.safetensors.index.json", 9), "index.json is no index of tensors"),
        (lambda model: [each.unlink() for each in model.glob("model*")], "holds no checkpoint of a model"),
        (
            lambda model: [each.unlink() for each in model.glob("tok*")],
            "makes no token of a text; copy the tokenizer's",
        ),
    ],
    ids=[
        *(
            "config cut",
            "unknown type",
            "wrong value",
            "another size",
            "a layer more",
            "a shard missing",
            "a shard cut",
        ),
        *("an empty shard", "index cut", "no weights", "no tokenizer"),
    ],
)
def test_a_broken_directory_is_refused_in_one_line_before_ranks_start(
    break_it: Any,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import transformers

    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("core.training.main.start_ranks", lambda _: 77)
    check_model(load_config(["--run.directory", str(tmp_path)]))
    made, model = next(Path("tiny").iterdir()), Path("model")
    transformers.AutoTokenizer.from_pretrained(made).save_pretrained(model)
    transformers.AutoModelForCausalLM.from_pretrained(made).save_pretrained(model, max_shard_size="300KB")
    assert main(["--model", "model", "--logging.no-plots"]) == 77
    break_it(model)
    capsys.readouterr()
    assert main(["--model", "model", "--logging.no-plots"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and message in said, said


def test_tokens_without_a_row_are_refused_before_ranks_start_if_the_data_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("core.training.main.start_ranks", lambda _: 77)
    check_model(load_config(["--model.sequence-length", "64", "--run.directory", str(tmp_path)]))
    model = next(Path("tiny").iterdir())
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(model)
    Path("data.jsonl").write_text('{"text": "plain"}\n' * 3)
    flags = ["--model", str(model), "--data", "data.jsonl", "--model.sequence-length", "64", "--logging.no-plots"]
    assert main(flags) == 77
    Path("data.jsonl").write_text('{"text": "plain"}\n' * 3 + '{"text": "a zebra"}\n')
    capsys.readouterr()
    assert main(flags) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert "data.jsonl, line 4: the token 'zebra' has the id 259, and the model's embedding has 259 rows" in said


def test_what_is_right_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("core.training.main.start_ranks", lambda _: 77)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--tp", "2", "--logging.no-plots"]) == 77

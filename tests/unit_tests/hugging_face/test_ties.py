"""Directories whose config.json says tied, and whose files hold an output layer of its own: a merged adapter."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from core.hugging_face import load_split, save_split
from core.pipeline_parallel import plan_pipeline
from tests.unit_tests.hugging_face.models import small, tokens, whole
from tests.unit_tests.ranks import ranks

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def merged(directory: Path, rank: int, form: str = "one", last_row_only: bool = True) -> Any:
    """Save a directory that contradicts its config.json; the model as transformers loads it.

    Only the last row differs, which a rank of a split model may not hold. form: 'one' file, 'shards', or 'bin'.
    """
    from safetensors.torch import load_file, save_file

    if rank == 0:
        small("llama", torch.float32, num_hidden_layers=4, tie_word_embeddings=True).save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        head = tensors[EMBEDDING].clone()
        head[-1 if last_row_only else slice(None)] += 0.3
        tensors[HEAD] = head
        if form == "one":
            save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        elif form == "bin":
            (directory / "model.safetensors").unlink()
            torch.save(tensors, directory / "pytorch_model.bin")
        else:
            kind = type(small("llama", torch.float32))
            untied = kind.from_pretrained(directory, tie_word_embeddings=False)
            untied.load_state_dict(tensors)
            untied.save_pretrained(directory, max_shard_size="20KB")
            (directory / "model.safetensors").unlink()
            config = (directory / "config.json").read_text()
            (directory / "config.json").write_text(config.replace('embeddings": false', 'embeddings": true'))
    dist.barrier()
    kind = type(small("llama", torch.float32))
    reference = kind.from_pretrained(directory)
    tied = kind(copy.deepcopy(reference.config))
    tied.load_state_dict({**reference.state_dict(), HEAD: reference.state_dict()[EMBEDDING]})
    off = reference(input_ids=tokens()).logits - tied(input_ids=tokens()).logits
    assert reference.config.tie_word_embeddings and off.abs().max() > 0.1
    return reference


@ranks(2)
@pytest.mark.parametrize("form", ["one", "shards"])
def test_a_split_model_has_the_output_layer_that_the_files_hold(
    rank: int, world: int, form: str, tmp_path: Path
) -> None:
    reference = merged(tmp_path / "merged", rank, form)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with pytest.warns(UserWarning, match="ties 'lm_head.weight' to 'model.embed_tokens.weight'"):
        model = load_split(tmp_path / "merged")
    for name in (HEAD, EMBEDDING):
        assert torch.equal(whole(model, name, model.get_parameter(name).detach()), reference.get_parameter(name))
    torch.testing.assert_close(model(input_ids=tokens()).logits, reference(input_ids=tokens()).logits)
    save_split(model, tmp_path / "saved")
    again = type(reference).from_pretrained(tmp_path / "saved")
    assert torch.equal(again.get_parameter(HEAD), reference.get_parameter(HEAD))


@ranks(2)
def test_stages_have_the_output_layer_that_the_files_hold(rank: int, world: int, tmp_path: Path) -> None:
    reference = merged(tmp_path / "merged", rank)
    layout = plan_pipeline(4, 2)
    parallel_state.initialize_model_parallel(1, 2, get_embedding_ranks=layout.embedding_ranks)
    stages = load_split(tmp_path / "merged", layout=layout)
    save_split(stages, tmp_path / "saved")
    again = type(reference).from_pretrained(tmp_path / "saved")
    for name in (HEAD, EMBEDDING):
        assert torch.equal(again.get_parameter(name), reference.get_parameter(name)), name


PLUGINS = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
    "gemini over tp": lambda: GeminiPlugin(precision="fp32", tp_size=2),
    "tp": lambda: HybridParallelPlugin(2, 1, precision="fp32"),
    "pp": lambda: HybridParallelPlugin(1, 2, precision="fp32", num_microbatches=2),
}


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("form", ["one", "shards", "bin"])
@pytest.mark.in_suite()
def test_a_tied_model_that_is_boosted_refuses_the_files_by_both_names(
    rank: int, world: int, plugin: str, form: str, tmp_path: Path
) -> None:
    merged(tmp_path, rank, form)
    booster = Booster(plugin=PLUGINS[plugin]())
    model = small("llama", torch.float32, num_hidden_layers=4, tie_word_embeddings=True)
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' and 'lm_head.weight' with different values"):
        booster.load_model(model, tmp_path)


@ranks(2)
def test_files_that_rename_their_tensors_are_refused_too(rank: int, world: int, tmp_path: Path) -> None:
    """Without the prefix of the model inside, as files of a base model have them."""
    from safetensors.torch import load_file, save_file

    merged(tmp_path, rank)
    if rank == 0:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    dist.barrier()
    booster = Booster(plugin=HybridParallelPlugin(2, 1, precision="fp32"))
    model = small("llama", torch.float32, num_hidden_layers=4, tie_word_embeddings=True)
    model, *_ = booster.boost(model)
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' and 'lm_head.weight' with different values"):
        booster.load_model(model, tmp_path)


def test_two_names_with_equal_values_stay_tied(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from core.hugging_face.read.ties import untie_by_files

    model = small("llama", torch.float32, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING] + 1e-9
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert not torch.equal(tensors[HEAD], tensors[EMBEDDING])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert untie_by_files(model.bfloat16(), tmp_path, [tmp_path / "model.safetensors"]) == []
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.warns(UserWarning, match="different values"):
        assert untie_by_files(model.float(), tmp_path, [tmp_path / "model.safetensors"]) == [HEAD]
    assert model.lm_head.weight is not model.model.embed_tokens.weight

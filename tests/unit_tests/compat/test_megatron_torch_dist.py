"""Checkpoints that Megatron itself has written: tensors by its names come into a GPT of here, at any layout."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor

import core.compat.megatron as mcore
from core.checkpoint import CheckpointError
from core.compat.megatron.faces.torch_dist import MegatronReader
from tests.unit_tests.booster.test_booster_checkpoint import shared
from tests.unit_tests.ranks import ranks

LAYERS, HIDDEN, FFN, VOCABULARY, PADDED = 2, 16, 24, 30, 32


def theirs(numbered: bool) -> dict[str, Tensor]:
    """The tensors of a llama-like GPT under Megatron's names: layers stacked, or numbered with the gated weight in two.

    The vocabulary is padded, as Megatron's programs do it before they make the model.
    """
    draw = torch.Generator().manual_seed(3)
    shapes = {
        "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
        "self_attention.linear_qkv.weight": (HIDDEN * 2, HIDDEN),
        "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
        "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
        "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
        "mlp.linear_fc2.weight": (HIDDEN, FFN),
    }
    found = {}
    for name, shape in shapes.items():
        stacked = torch.randn(LAYERS, *shape, generator=draw)
        if not numbered:
            found[f"decoder.layers.{name}"] = stacked
        for layer in range(LAYERS) if numbered else ():
            parts = zip("wv", stacked[layer].chunk(2), strict=True) if "fc1.weight" in name else [("", stacked[layer])]
            found |= {f"decoder.layers.{layer}.{name}{'_' * bool(end)}{end}": part.clone() for end, part in parts}
    found["decoder.final_layernorm.weight"] = torch.randn(HIDDEN, generator=draw)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        found[name] = torch.randn(PADDED, HIDDEN, generator=draw)
    return found


def write(directory: Path, tensors: dict[str, Any], common: Any) -> None:
    """A directory as Megatron's dist_checkpointing leaves it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=directory, no_dist=True)
    torch.save(common, directory / "common.pt")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def new_gpt(tensor_parallel: int = 1, layers: int = LAYERS) -> Any:
    config = mcore.transformer.TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=FFN,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
        tensor_model_parallel_size=tensor_parallel, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    spec = mcore.models.gpt.gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    return mcore.models.gpt.GPTModel(config, spec, VOCABULARY, 8, position_embedding_type="rope")


class Unknown:
    """A value of a class that a checkpoint has no business to make."""

    def __reduce__(self) -> Any:
        return print, ("this code ran",)


@ranks(2)
@pytest.mark.parametrize("numbered", [False, True])
def test_weights_of_megatrons_files_come_into_slices(rank: int, world: int, tmp_path: Path, numbered: bool) -> None:
    directory, tensors = shared(tmp_path), theirs(numbered)
    if rank == 0:
        write(directory, tensors, {"iteration": 7, "args": argparse.Namespace(lr=0.1), "odd": Unknown()})
    torch.distributed.barrier()
    mcore.mpu.initialize_model_parallel(2)
    model = new_gpt(2)
    loaded = mcore.dist_checkpointing.load({"model": model.sharded_state_dict()}, directory, strict="raise_all")
    model.load_state_dict(loaded["model"])
    assert loaded["iteration"] == 7 and loaded["args"].lr == 0.1 and "odd" not in loaded
    stacked, rows = theirs(False), slice(FFN // 2 * rank, FFN // 2 * (rank + 1))
    for layer in range(LAYERS):
        gate, value = stacked["decoder.layers.mlp.linear_fc1.weight"][layer].chunk(2)
        own = model.decoder.layers[layer]
        assert torch.equal(own.mlp.linear_fc1.weight, torch.cat([gate[rows], value[rows]]))
        norm = stacked["decoder.layers.self_attention.linear_qkv.layer_norm_weight"][layer]
        assert torch.equal(own.input_layernorm.weight, norm)
        mixed = stacked["decoder.layers.self_attention.linear_qkv.weight"][layer]
        assert torch.equal(own.self_attention.linear_qkv.weight, mixed.chunk(2)[rank])
    words = stacked["embedding.word_embeddings.weight"][:VOCABULARY]
    assert torch.equal(model.embedding.word_embeddings.weight, words.chunk(2)[rank])
    plain = mcore.dist_checkpointing.load_plain_tensors(directory)
    assert set(plain) == set(tensors) and all(torch.equal(plain[name], tensor) for name, tensor in tensors.items())


@ranks(1)
def test_what_cannot_be_read_of_megatrons_files_says_so(rank: int, world: int, tmp_path: Path) -> None:
    mcore.mpu.initialize_model_parallel()
    tensors = theirs(False)
    del tensors["decoder.final_layernorm.weight"]
    write(tmp_path, tensors, {"content_metadata": {"kind": "theirs"}})
    model = new_gpt()
    with pytest.raises(CheckpointError, match="does not have 'decoder.final_layernorm.weight'"):
        mcore.dist_checkpointing.load({"model": model.sharded_state_dict()}, tmp_path)
    assert mcore.dist_checkpointing.load_content_metadata(tmp_path) == {"kind": "theirs"}
    assert mcore.dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    wrapped = mcore.DistributedDataParallel(model.config, mcore.distributed.DistributedDataParallelConfig(), model)
    optimizer = mcore.optimizer.get_megatron_optimizer(mcore.optimizer.OptimizerConfig(lr=0.1), [wrapped])
    tree = {"optimizer": optimizer.sharded_state_dict()}
    with pytest.raises(CheckpointError, match="leave the optimizer out of the tree"):
        mcore.dist_checkpointing.load(tree, tmp_path)
    with pytest.raises(CheckpointError, match="has 2 layers in the file and the model 1"):
        mcore.dist_checkpointing.load({"model": new_gpt(layers=1).sharded_state_dict()}, tmp_path, strict="ignore_all")
    tensors["output_layer.weight"] = torch.zeros(VOCABULARY - 1, HIDDEN)
    other = tmp_path / "other"
    other.mkdir()
    write(other, tensors, {})
    with pytest.raises(CheckpointError, match=r"'output_layer.weight' is \[29, 16\] in it and \[30, 16\] here"):
        mcore.dist_checkpointing.load({"model": model.sharded_state_dict()}, other, strict="ignore_all")


def test_an_index_that_would_run_code_runs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Unknown()))
    with pytest.raises(CheckpointError, match="is no index"):
        MegatronReader(str(tmp_path)).read_metadata()
    (tmp_path / "common.pt").write_bytes(pickle.dumps(Unknown()))
    with pytest.raises(RuntimeError, match="magic"):
        MegatronReader(str(tmp_path)).common()
    assert capsys.readouterr().out == ""


@ranks(2)
def test_weights_of_slices_go_to_transformers_and_come_back(rank: int, world: int, tmp_path: Path) -> None:
    directory = shared(tmp_path)
    (directory / "checkpoint").mkdir(exist_ok=True)
    mcore.mpu.initialize_model_parallel(2)
    model = new_gpt(2)
    with pytest.raises(ValueError, match="save_pretrained is for a whole model"):
        model.save_pretrained(directory)
    mcore.dist_checkpointing.save(model.sharded_state_dict(), directory / "checkpoint")
    mcore.mpu.destroy_model_parallel()
    mcore.mpu.initialize_model_parallel()
    whole, again = new_gpt(), new_gpt()
    whole.load_state_dict(mcore.dist_checkpointing.load(whole.sharded_state_dict(), directory / "checkpoint"))
    if rank == 0:
        whole.save_pretrained(directory / "llama")
        with torch.no_grad():
            for param in again.parameters():
                param.zero_()
        again.load_pretrained(directory / "llama")
        for name, param in again.named_parameters():
            assert torch.equal(param, whole.get_parameter(name)), name
        again.our_config = dataclasses.replace(again.our_config, rotary_base=5.0)
        with pytest.raises(ValueError, match="rotary_base is 5.0 in the model and 10000.0 in the files"):
            again.load_pretrained(directory / "llama")
        if importlib.util.find_spec("transformers") is not None:
            from transformers import AutoModelForCausalLM

            tokens = torch.arange(8).view(1, 8)
            theirs = AutoModelForCausalLM.from_pretrained(directory / "llama")(tokens).logits
            torch.testing.assert_close(whole(tokens, None, None), theirs, atol=1e-5, rtol=1e-4)

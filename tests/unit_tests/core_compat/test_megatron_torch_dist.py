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

import core_compat.megatron as mcore
from core.checkpoint import CheckpointError
from core.checkpoint.transformers_files import load_pretrained, save_pretrained
from core.models.gpt import GPTModel
from core.transformer import TransformerConfig
from core_compat.convert import main
from core_compat.megatron.torch_dist import MegatronReader
from core_compat.megatron.tree_files import module_tree
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


LLAMA: dict[str, Any] = dict(
    num_query_groups=2, normalization="RMSNorm", activation="swiglu", add_bias_linear=False,
    position_embedding_type="rope",
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {"llama": LLAMA, "arcee": {**LLAMA, "activation": "gelu"}, "gpt2": {}}


def new_gpt(tensor_parallel: int = 1, layers: int = LAYERS, kind: str = "llama") -> Any:
    config = TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=FFN, **KINDS[kind],
        tensor_model_parallel_size=tensor_parallel, init_method_std=0.2, vocab_size=VOCABULARY, max_sequence_length=8,
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    return GPTModel(config)


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
    loaded = mcore.dist_checkpointing.load({"model": module_tree(model)}, directory, strict="raise_all")
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


@pytest.mark.parametrize("numbered", [False, True])
def test_the_command_makes_a_state_dict_by_our_names_of_megatrons_files(tmp_path: Path, numbered: bool) -> None:
    write(tmp_path, {**theirs(numbered), "optimizer.state.exp_avg.output_layer.weight": torch.ones(2)}, {})
    assert main([str(tmp_path), str(tmp_path / "weights.pt")]) == 0
    found = torch.load(tmp_path / "weights.pt")
    stacked = theirs(False)
    assert len(found) == 3 + 6 * LAYERS and torch.equal(found["output_layer.weight"], stacked["output_layer.weight"])
    for layer in range(LAYERS):
        own, there = f"decoder.layers.{layer}.", "decoder.layers."
        for name in ("mlp.linear_fc1.weight", "self_attention.linear_qkv.weight", "mlp.linear_fc2.weight"):
            assert torch.equal(found[own + name], stacked[there + name][layer]), name
        norm = stacked[f"{there}mlp.linear_fc1.layer_norm_weight"][layer]
        assert torch.equal(found[f"{own}pre_mlp_layernorm.weight"], norm)


@ranks(1)
def test_what_cannot_be_read_of_megatrons_files_says_so(rank: int, world: int, tmp_path: Path) -> None:
    mcore.mpu.initialize_model_parallel()
    tensors = theirs(False)
    del tensors["decoder.final_layernorm.weight"]
    write(tmp_path, tensors, {"content_metadata": {"kind": "theirs"}})
    model = new_gpt()
    with pytest.raises(CheckpointError, match="does not have 'decoder.final_layernorm.weight'"):
        mcore.dist_checkpointing.load({"model": module_tree(model)}, tmp_path)
    assert mcore.dist_checkpointing.load_content_metadata(tmp_path) == {"kind": "theirs"}
    assert mcore.dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    wrapped = mcore.DistributedDataParallel(model.config, mcore.distributed.DistributedDataParallelConfig(), model)
    optimizer = mcore.optimizer.get_megatron_optimizer(mcore.optimizer.OptimizerConfig(lr=0.1), [wrapped])
    tree = {"optimizer": optimizer.sharded_state_dict()}
    for number, (key, value, common, words) in enumerate(
        (
            ("odd", torch.zeros(1), {}, "holds no optimizer state; leave the optimizer out of the tree"),
            ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg", torch.zeros(1), {}, "state is dp_reshardable"),
            ("optimizer.distributed.dp_group_idx_0.param_state/shard_0_1", "blob", {}, "is dp_zero_gather_scatter"),
            ("optimizer.state.exp_avg.decoder.final_layernorm.weight", torch.zeros(HIDDEN), {}, r"step counts \[\]"),
            ("optimizer.state.param.decoder.final_layernorm.weight", torch.zeros(HIDDEN), {}, "lacks 'model.decoder"),
        )
    ):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number), {**tensors, key: value}, common)
        with pytest.raises(CheckpointError, match=words):
            mcore.dist_checkpointing.load(tree, tmp_path / str(number))
    with pytest.raises(CheckpointError, match="has 2 layers in the file and the model 1"):
        mcore.dist_checkpointing.load({"model": module_tree(new_gpt(layers=1))}, tmp_path, strict="ignore_all")
    tensors["output_layer.weight"] = torch.zeros(VOCABULARY - 1, HIDDEN)
    other = tmp_path / "other"
    other.mkdir()
    write(other, tensors, {})
    with pytest.raises(CheckpointError, match=r"'output_layer.weight' is \[29, 16\] in it and \[30, 16\] here"):
        mcore.dist_checkpointing.load({"model": module_tree(model)}, other, strict="ignore_all")


def as_megatron_names(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors by our names under Megatron's: layers stacked, norms named after the layer behind, words padded."""
    norms = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if name.startswith("decoder.layers.0."):
            rest = name.removeprefix("decoder.layers.0.")
            there = next((new + rest[len(old) :] for old, new in norms.items() if rest.startswith(old)), rest)
            found[f"decoder.layers.{there}"] = torch.stack(
                [values[f"decoder.layers.{n}.{rest}"] for n in range(LAYERS)]
            )
        elif not name.startswith("decoder.layers."):
            padding = PADDED - VOCABULARY if value.shape[0] == VOCABULARY else 0
            found[name] = F.pad(value, (0, 0) * (value.dim() - 1) + (0, padding))
    return found


def in_flat_slices(name: str, value: Tensor) -> Tensor:
    """A tensor as fully_sharded_model_space keeps it on 2 tensor-parallel ranks: [slices of each axis, elements]."""
    slices = [1] * value.dim()
    if ".layers." in name:
        slices[0] = LAYERS
    if value.dim() - (".layers." in name) == 2:
        slices[-1 if "proj" in name or "fc2" in name else -2] = 4 if "fc1" in name else 2
    for axis, parts in enumerate(slices):
        value = value.unflatten(2 * axis, (parts, -1))
    return value.permute(*range(0, value.dim(), 2), *range(1, value.dim(), 2)).reshape(*slices, -1)


def adam_step(model: Any, optimizer: Any, step: int) -> None:
    tokens = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(tokens, tokens.roll(-1, 1)).mean().backward()


@ranks(2)
@pytest.mark.parametrize("kind", ["fully_reshardable", "fully_sharded_model_space"])
def test_training_goes_on_from_megatrons_optimizer_states(rank: int, world: int, tmp_path: Path, kind: str) -> None:
    directory = shared(tmp_path)
    mcore.mpu.initialize_model_parallel()
    alone = new_gpt()
    adam = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(2):
        adam_step(alone, adam, step)
        adam.step()
    names = {name: param.detach().clone() for name, param in alone.named_parameters()}
    moments = {
        key: {name: adam.state[param][key].clone() for name, param in alone.named_parameters()}
        for key in ("exp_avg", "exp_avg_sq")
    }
    flat = kind == "fully_sharded_model_space"
    if rank == 0:
        states = {"fp32_param" if flat else "param": names, **moments}
        tensors = as_megatron_names(names)
        for key, values in states.items():
            for name, value in as_megatron_names(values).items():
                prefix = "chained_0.optimizer.state" if flat else "optimizer.state"
                tensors[f"{prefix}.{key}.{name}"] = in_flat_slices(name, value) if flat else value
        groups = {"optimizer": {"param_groups": [{"step": 2, "lr": 0.5}]}, "param_state_sharding_type": kind}
        write(directory, tensors, {"iteration": 2, "optimizer": {0: groups} if flat else groups})
    torch.distributed.barrier()
    mcore.mpu.destroy_model_parallel()
    # Each format at another layout than its writer's: whole tensors over tp, slices of tp over the data ranks.
    mcore.mpu.initialize_model_parallel(1 if flat else 2)
    model = new_gpt(1 if flat else 2)
    if flat:
        model.config.bf16 = True
        model = mcore.transformer.module.Float16Module(model.config, model)
    ddp_config = mcore.distributed.DistributedDataParallelConfig(use_distributed_optimizer=flat)
    wrapped = mcore.DistributedDataParallel(model.config, ddp_config, model)
    settings = mcore.optimizer.OptimizerConfig(lr=0.01, weight_decay=0.0, clip_grad=0.0, use_distributed_optimizer=flat)
    settings.bf16 = flat
    optimizer = mcore.optimizer.get_megatron_optimizer(settings, [wrapped])
    tree = {"model": module_tree(model), "optimizer": optimizer.sharded_state_dict(is_loading=True)}
    loaded = mcore.dist_checkpointing.load(tree, directory, strict="raise_all")
    wrapped.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["iteration"] == 2 and optimizer.param_groups[0]["lr"] == 0.01
    if flat:
        seen = 0
        for name, entries in optimizer.state_by_parameter().items():
            ours = name.removeprefix("module.")
            for entry in entries:
                part = slice(entry["offset"], entry["offset"] + entry["numel"])
                assert torch.equal(entry["master"], names[ours].flatten()[part]) and float(entry["step"]) == 2
                for key, values in moments.items():
                    assert torch.equal(entry[key], values[ours].flatten()[part]), (name, key)
                seen += entry["numel"]
        total = torch.tensor(seen)
        torch.distributed.all_reduce(total)
        assert int(total) == sum(value.numel() for value in names.values())
        return
    adam_step(alone, adam, 2)
    adam.step()
    adam_step(wrapped, optimizer, 2)
    mcore.distributed.finalize_model_grads([wrapped])
    optimizer.step()
    moved = 0.0
    for name, param in model.named_parameters():
        whole = dict(alone.named_parameters())[name]
        moved = max(moved, float((whole - names[name]).abs().max()))
        axis = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
        if "fc1" in name:
            expected = torch.cat([half.chunk(2)[rank] for half in whole.chunk(2)])
        else:
            expected = whole if axis is None else whole.chunk(2, axis)[rank]
        torch.testing.assert_close(param, expected[: param.shape[0]], atol=2e-6, rtol=0)
    assert moved > 5e-3


def test_an_index_that_would_run_code_runs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Unknown()))
    with pytest.raises(CheckpointError, match="is no index"):
        MegatronReader(str(tmp_path)).read_metadata()
    (tmp_path / "common.pt").write_bytes(pickle.dumps(Unknown()))
    with pytest.raises(RuntimeError, match="magic"):
        MegatronReader(str(tmp_path)).common()
    assert capsys.readouterr().out == ""


@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_slices_go_to_transformers_and_come_back(rank: int, world: int, tmp_path: Path, kind: str) -> None:
    directory = shared(tmp_path)
    (directory / "checkpoint").mkdir(exist_ok=True)
    mcore.mpu.initialize_model_parallel(2)
    model = new_gpt(2, kind=kind)
    with pytest.raises(ValueError, match="save_pretrained needs a complete model"):
        save_pretrained(model, directory)
    mcore.dist_checkpointing.save(module_tree(model), directory / "checkpoint")
    mcore.mpu.destroy_model_parallel()
    mcore.mpu.initialize_model_parallel()
    whole, again = new_gpt(kind=kind), new_gpt(kind=kind)
    whole.load_state_dict(mcore.dist_checkpointing.load(module_tree(whole), directory / "checkpoint"))
    if rank != 0:
        return
    save_pretrained(whole, directory / kind)
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    load_pretrained(again, directory / kind)
    for name, param in again.named_parameters():
        assert torch.equal(param, whole.get_parameter(name)), name
    if importlib.util.find_spec("transformers") is not None:
        from transformers import AutoModelForCausalLM

        tokens = torch.arange(8).view(1, 8)

        def logits_of(model: GPTModel) -> Tensor:
            return model(tokens).transpose(0, 1)

        theirs = AutoModelForCausalLM.from_pretrained(directory / kind)
        assert theirs.config.model_type == kind
        torch.testing.assert_close(logits_of(whole), theirs(tokens).logits, atol=1e-5, rtol=1e-4)
        with torch.no_grad():  # the other way: a directory that transformers has written
            for param in theirs.parameters():
                param += 0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel()))
        theirs.save_pretrained(directory / "theirs")
        load_pretrained(again, directory / "theirs")
        logits = logits_of(again)
        torch.testing.assert_close(logits, theirs(tokens).logits, atol=1e-5, rtol=1e-4)
        assert float((logits - logits_of(whole)).detach().abs().max()) > 0.1
    again.config = dataclasses.replace(again.config, layernorm_epsilon=0.5)
    with pytest.raises(ValueError, match="layernorm_epsilon is 0.5 in the model and 1e-05 in the files"):
        load_pretrained(again, directory / kind)

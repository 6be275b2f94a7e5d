"""Conversion of GPTModel's weights to and from Hugging Face transformers by renaming, splitting and joining.

The options of a full GPT determine one of three layouts of transformers:

    gpt2     LayerNorm, gelu, learned positions, biases, as many key/value heads as heads
    llama    RMSNorm, swiglu, rotary positions
    arcee    RMSNorm, gelu, rotary positions: Llama with an MLP without a gate

Options without a counterpart are rejected by name. Nothing is imported from transformers, whose configuration is a
dictionary with the content of config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.transformer.transformer_config import TransformerConfig

LAYOUTS = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "arcee": "ArceeForCausalLM"}
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
EMBEDDINGS = {"gpt2": "transformer.wte.weight", **dict.fromkeys(("llama", "arcee"), "model.embed_tokens.weight")}
HEAD = "lm_head.weight"  # in all layouts
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}


@dataclass(frozen=True)
class NamePair:
    """A tensor of GPTModel, the transformers tensors with the same numbers, and the conversion in both directions."""

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[Tensor], Sequence[Tensor]]  # ours to theirs
    join: Callable[[Sequence[Tensor]], Tensor]


def layout_of(config: TransformerConfig) -> str:
    """Return the layout of a configuration: 'gpt2', 'llama' or 'arcee'. Raises ValueError for an unsupported option."""
    if config.num_moe_experts is not None:
        raise ValueError(f"num_moe_experts is {config.num_moe_experts}; experts have no counterpart in these layouts")
    if config.qk_layernorm:
        raise ValueError("qk_layernorm is True; norms of queries and keys have no counterpart in these layouts")
    kind = (config.normalization, config.activation, config.position_embedding_type)
    if kind == ("RMSNorm", "swiglu", "rope"):
        return "llama"
    if kind == ("RMSNorm", "gelu", "rope"):
        return "arcee"
    if kind != ("LayerNorm", "gelu", "learned_absolute"):
        raise ValueError(
            f"normalization {kind[0]}, activation {kind[1]} and position_embedding_type {kind[2]} are together in no "
            "layout: gpt2 has LayerNorm, gelu and learned_absolute; llama has RMSNorm, swiglu and rope; arcee has "
            "RMSNorm, gelu and rope"
        )
    if config.query_groups != config.num_attention_heads:
        raise ValueError(
            f"num_query_groups is {config.query_groups} with {config.num_attention_heads} heads; gpt2 has a key and a "
            "value for each head"
        )
    if not config.add_bias_linear:
        raise ValueError("add_bias_linear is False; gpt2 has biases in every linear layer")
    if config.head_size * config.num_attention_heads != config.hidden_size:
        raise ValueError(f"kv_channels is {config.head_size}; gpt2 has hidden_size / num_attention_heads")
    return "gpt2"


def config_for_transformers(config: TransformerConfig) -> dict[str, Any]:
    """Convert a configuration to the content of config.json."""
    layout = layout_of(config)
    common = {
        "model_type": layout,
        "architectures": [LAYOUTS[layout]],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.share_embeddings_and_output_weights,
        "dtype": DTYPES[config.params_dtype],
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": config.init_method_std,
    }
    if layout == "gpt2":
        return {
            **common,
            "n_layer": config.num_layers,
            "n_embd": config.hidden_size,
            "n_head": config.num_attention_heads,
            "n_inner": config.ffn_size,
            "n_positions": config.max_sequence_length,
            "layer_norm_epsilon": config.layernorm_epsilon,
            "activation_function": "gelu",
            "attn_pdrop": config.attention_dropout,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop"), config.hidden_dropout),
        }
    return {
        **common,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_theta": config.rotary_base,
        "hidden_act": "silu" if layout == "llama" else "gelu",
        "attention_bias": config.add_bias_linear,
        "mlp_bias": config.add_bias_linear,
        "attention_dropout": config.attention_dropout,
    }


def config_from_transformers(theirs: Mapping[str, Any]) -> TransformerConfig:
    """Convert the content of a config.json to a TransformerConfig.

    Raises ValueError, naming the entry, if GPTModel does not support one.
    """
    layout = theirs.get("model_type")
    if layout not in LAYOUTS:
        raise ValueError(f"model_type is {layout!r}; read are {', '.join(LAYOUTS)}")
    if layout == "gpt2":
        _expect(theirs, activation_function="gelu", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
        _expect(theirs, add_cross_attention=False)
        return TransformerConfig(
            num_layers=theirs["n_layer"],
            hidden_size=theirs["n_embd"],
            num_attention_heads=theirs["n_head"],
            ffn_hidden_size=theirs.get("n_inner"),
            max_sequence_length=theirs["n_positions"],
            layernorm_epsilon=theirs.get("layer_norm_epsilon", 1e-5),
            **_common(theirs),
        )
    _expect(theirs, hidden_act="silu" if layout == "llama" else "gelu")
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"the rotary positions are of the type {rope['rope_type']!r}; ours have no scaling")
    has_bias = theirs.get("attention_bias", False)
    _expect(theirs, mlp_bias=has_bias)  # ours has both or none
    heads = theirs["num_attention_heads"]
    return TransformerConfig(
        num_layers=theirs["num_hidden_layers"],
        hidden_size=theirs["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=theirs.get("num_key_value_heads", heads),
        kv_channels=theirs.get("head_dim") or theirs["hidden_size"] // heads,
        ffn_hidden_size=theirs["intermediate_size"],
        max_sequence_length=theirs["max_position_embeddings"],
        normalization="RMSNorm",
        layernorm_epsilon=theirs.get("rms_norm_eps", 1e-6),
        activation="swiglu" if layout == "llama" else "gelu",
        position_embedding_type="rope",
        rotary_base=float(theirs.get("rope_theta") or rope.get("rope_theta", 10000.0)),
        add_bias_linear=has_bias,
        **_common(theirs),
    )


def _common(theirs: Mapping[str, Any]) -> dict[str, Any]:
    name = str(theirs.get("dtype") or theirs.get("torch_dtype") or "float32")
    dtypes = {text: dtype for dtype, text in DTYPES.items()}
    if name not in dtypes:
        raise ValueError(f"dtype is {name!r}; read are {', '.join(dtypes)}")
    tied_by_default = theirs["model_type"] == "gpt2"
    return {
        "vocab_size": theirs["vocab_size"],
        "share_embeddings_and_output_weights": theirs.get("tie_word_embeddings", tied_by_default),
        "params_dtype": dtypes[name],
        "bf16": name == "bfloat16",
        "fp16": name == "float16",
    }


def _expect(theirs: Mapping[str, Any], **wanted: Any) -> None:
    for name, value in wanted.items():
        if theirs.get(name, value) != value:
            raise ValueError(f"{name} is {theirs[name]!r}; our GPT computes as with {value!r}, and with nothing else")


def to_transformers(config: TransformerConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state_dict of a full GPTModel to transformers.

    Raises ValueError if ``state`` has other names than a full GPT of this configuration.
    """
    entries = list(_entries(config))
    _same_names({entry.ours for entry in entries}, state)
    return {
        name: part.contiguous()
        for entry in entries
        for name, part in zip(entry.theirs, entry.split(state[entry.ours]), strict=True)
    }


def from_transformers(config: TransformerConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state_dict of a transformers model to GPTModel. Raises ValueError if it has other names."""
    entries = list(_entries(config))
    names = {name for entry in entries for name in entry.theirs}
    ignored = {HEAD} if config.share_embeddings_and_output_weights else set()
    ignored |= {name for name in theirs if name.endswith((".attn.bias", ".attn.masked_bias", ".inv_freq"))}  # constants
    _same_names(names, {name: tensor for name, tensor in theirs.items() if name in names or name not in ignored})
    return {entry.ours: entry.join([theirs[name] for name in entry.theirs]).contiguous() for entry in entries}


def paths_of(config: TransformerConfig) -> dict[str, str]:
    """Map the names of GPTModel's modules to transformers modules with the same output, except mixed projections."""
    found = {}
    for entry in _entries(config):
        ours, (theirs, *more) = entry.ours, entry.theirs
        if ours.endswith(".weight") and not more and not ours.endswith(("linear_qkv.weight", "embeddings.weight")):
            found[ours.removesuffix(".weight")] = theirs.removesuffix(".weight")
    layers, attention = ("transformer.h", "attn") if layout_of(config) == "gpt2" else ("model.layers", "self_attn")
    for number in range(config.num_layers):
        found[f"decoder.layers.{number}"] = f"{layers}.{number}"
        found[f"decoder.layers.{number}.self_attention"] = f"{layers}.{number}.{attention}"
    return found


def _same_names(expected: set[str], found: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(expected - set(found)), sorted(set(found) - expected)
    if missing or unknown:
        parts = [f"{what} {', '.join(names[:5])}" for what, names in (("lacks", missing), ("has", unknown)) if names]
        raise ValueError(f"these are not the weights that the configuration describes: the file {'; it '.join(parts)}")


def _entries(config: TransformerConfig) -> Iterator[NamePair]:
    yield _same(EMBEDDING, EMBEDDINGS[layout_of(config)])
    if layout_of(config) == "gpt2":
        yield _same("embedding.position_embeddings.weight", "transformer.wpe.weight")
        final, layer = "transformer.ln_f", _gpt2_layer
    else:
        final, layer = "model.norm", _llama_layer
    for number in range(config.num_layers):
        yield from layer(config, f"decoder.layers.{number}", number)
    for kind in ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",):
        yield _same(f"decoder.final_layernorm.{kind}", f"{final}.{kind}")
    if not config.share_embeddings_and_output_weights:
        yield _same(OUTPUT, HEAD)


def _gpt2_layer(config: TransformerConfig, ours: str, number: int) -> Iterator[NamePair]:
    theirs = f"transformer.h.{number}"
    for kind in ("weight", "bias"):
        yield _same(f"{ours}.input_layernorm.{kind}", f"{theirs}.ln_1.{kind}")
        yield NamePair(
            f"{ours}.self_attention.linear_qkv.{kind}",
            (f"{theirs}.attn.c_attn.{kind}",),
            lambda mixed: [_turned(torch.cat(_split_qkv(config, mixed)))],
            lambda parts: _join_qkv(config, _turned(parts[0]).chunk(3)),
        )
        yield _linear(f"{ours}.self_attention.linear_proj.{kind}", f"{theirs}.attn.c_proj.{kind}")
        yield _same(f"{ours}.pre_mlp_layernorm.{kind}", f"{theirs}.ln_2.{kind}")
        yield _linear(f"{ours}.mlp.linear_fc1.{kind}", f"{theirs}.mlp.c_fc.{kind}")
        yield _linear(f"{ours}.mlp.linear_fc2.{kind}", f"{theirs}.mlp.c_proj.{kind}")


def _llama_layer(config: TransformerConfig, ours: str, number: int) -> Iterator[NamePair]:
    theirs = f"model.layers.{number}"
    yield _same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight")
    yield _same(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight")
    for kind in ("weight", "bias") if config.add_bias_linear else ("weight",):
        yield NamePair(
            f"{ours}.self_attention.linear_qkv.{kind}",
            tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv"),
            lambda mixed: _split_qkv(config, mixed),
            lambda parts: _join_qkv(config, parts),
        )
        yield _same(f"{ours}.self_attention.linear_proj.{kind}", f"{theirs}.self_attn.o_proj.{kind}")
        up = f"{theirs}.mlp.up_proj.{kind}"
        if config.activation == "swiglu":  # ours has the gate above the value
            gate = f"{theirs}.mlp.gate_proj.{kind}"
            yield NamePair(f"{ours}.mlp.linear_fc1.{kind}", (gate, up), lambda both: both.chunk(2), torch.cat)
        else:
            yield _same(f"{ours}.mlp.linear_fc1.{kind}", up)
        yield _same(f"{ours}.mlp.linear_fc2.{kind}", f"{theirs}.mlp.down_proj.{kind}")


def _same(ours: str, theirs: str) -> NamePair:
    return NamePair(ours, (theirs,), lambda whole: [whole], lambda parts: parts[0])


def _linear(ours: str, theirs: str) -> NamePair:
    """Pair a linear layer with gpt2's, which stores matrices as [in, out]."""
    return NamePair(ours, (theirs,), lambda whole: [_turned(whole)], lambda parts: _turned(parts[0]))


def _turned(tensor: Tensor) -> Tensor:
    return tensor.t() if tensor.dim() == 2 else tensor


def _split_qkv(config: TransformerConfig, mixed: Tensor) -> list[Tensor]:
    """Split rows grouped by query group (queries, key, value) into all queries, all keys, all values."""
    per_group = config.num_attention_heads // config.query_groups
    groups = mixed.unflatten(0, (config.query_groups, per_group + 2, config.head_size))
    return [part.flatten(0, 2) for part in groups.split([per_group, 1, 1], dim=1)]


def _join_qkv(config: TransformerConfig, parts: Sequence[Tensor]) -> Tensor:
    groups = [part.unflatten(0, (config.query_groups, -1, config.head_size)) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 2)

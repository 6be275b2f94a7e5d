"""Tiny random models of a family, made offline: ``tiny:FAMILY`` in place of a directory.

A table of names that configurations share makes a class small. Options other than sizes (query norms, sinks, kinds of
layers) keep the family's defaults.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from core.hugging_face.read.policies import POLICIES
from core.hugging_face.read.transformers_plans import transformers_package

LAYERS, HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD, VOCABULARY = 4, 64, 8, 4, 8, 96
BYTE_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # tokens 0 to 2 of the byte tokenizer
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Value -> config names that get it. Names that a class does not have are skipped.
SMALL: dict[str, Any] = {
    name: value
    for value, names in (
        (VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size vision_vocab_size"),
        (HIDDEN, "hidden_size n_embd d_model out_hidden_size prediction_head_size moe_hidden_size output_channels"),
        (HIDDEN, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
        (HIDDEN, "moe_shared_expert_intermediate_size shared_intermediate_size share_expert_dim"),
        (HIDDEN, "expert_ffn_hidden_size projector_hidden_size projector_input_dim projector_output_dim"),
        (2 * HIDDEN, "intermediate_size ffn_dim d_ff dense_intermediate_size intermediate_size_mlp ffn_hidden_size"),
        (2 * HIDDEN, "encoder_ffn_dim decoder_ffn_dim mlp_dim"),
        (LAYERS, "num_hidden_layers n_layer num_layers depth encoder_layers decoder_layers"),
        (HEADS, "num_attention_heads n_head num_heads swa_num_attention_heads"),
        (HEADS, "encoder_attention_heads decoder_attention_heads"),
        (KEY_VALUE_HEADS, "num_key_value_heads num_kv_heads swa_num_key_value_heads"),
        (HEAD, "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim swa_head_dim rotary_dim index_head_dim d_kv"),
        (4, "num_local_experts num_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok moe_k moe_topk top_k_experts num_shared_experts"),
        (1, "n_group topk_group first_k_dense_replace num_dense_layers bos_token_id eos_token_id"),
        (16, "q_lora_rank kv_lora_rank o_lora_rank hc_lowrank embedding_rank laurel_rank"),
        (16, "hidden_size_per_layer_input ple_embed_dim"),
        (64, "max_position_embeddings"),
        (4, "index_n_heads linear_num_key_heads"),
        (HEADS, "linear_num_value_heads linear_num_heads mamba_num_heads mamba_n_heads"),
        (HEAD, "linear_key_head_dim linear_value_head_dim linear_head_dim ssm_state_size mamba_d_state mamba_head_dim"),
        (4, "chunk_size mamba_chunk_size n_groups o_groups index_topk"),
        (5, "sliding_window sliding_window_size attention_chunk_size"),  # below 12 tokens, so that each takes effect
        (3, "floor_scale log_scaling_n_floor index_block_size"),
        (0, "num_kv_shared_layers pad_token_id zero_expert_num"),
    )
    for name in names.split()
}


# Sizes that a family may derive from others (None); a small copy has to set them.
NEEDED = {
    *("head_dim", "num_key_value_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_routed_experts", "top_k_experts", "n_group", "topk_group"),
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def families() -> dict[str, type]:
    """Return each configuration class of transformers with a tensor-parallel plan, by ``family/ClassName``."""
    transformers_package()
    import transformers.models as models

    found: dict[str, type] = {}
    for path in sorted(Path(str(models.__file__)).parent.glob("*/configuration_*.py")):
        if "base_model_tp_plan" in path.read_text(encoding="utf-8"):
            own = classes_of(f"transformers.models.{path.parent.name}.{path.stem}")
            for name, kind in own.items():
                is_old_name = any(base in own.values() for base in kind.__bases__)  # deprecated alias
                if getattr(kind, "base_model_tp_plan", None) and not is_old_name:
                    found[f"{path.parent.name}/{name}"] = kind
    return found


def classes_of(module: str) -> dict[str, type]:
    """Return the classes that a module defines, by name."""
    members = inspect.getmembers(importlib.import_module(module), inspect.isclass)
    return {name: kind for name, kind in members if kind.__module__ == module}


def families_with_policy() -> dict[str, type]:
    """Return the configuration class of each family that a policy of this package splits, by ``family/ClassName``."""
    kinds = [transformers_package().CONFIG_MAPPING[name.partition(",")[0]] for name in POLICIES]
    return {f"{kind.__module__.split('.')[2]}/{kind.__name__}": kind for kind in kinds}


def all_families() -> dict[str, type]:
    """Return all families with a plan or a policy."""
    return {**families(), **families_with_policy()}


def tiny_of_bytes(family: str, length: int) -> Any:
    """Create a small configuration of a family's model for sequences of ``length`` bytes, with three special tokens.

    Raises LookupError if no such family has a plan or a policy.
    """
    types = (family, f"{family}_text")  # multimodal families have a separate type for their text model
    kinds = all_families().items()
    found = next((kind for name, kind in kinds if name == family or getattr(kind, "model_type", "") in types), None)
    if found is None:
        like = difflib.get_close_matches(family, sorted({str(getattr(kind, "model_type", "")) for _, kind in kinds}))
        more = f"; is it {' or '.join(like)}?" if like else ""
        raise LookupError(f"no family with a plan or a policy is called {family!r}{more}")
    sizes: dict[str, Any] = {"vocab_size": 256 + len(BYTE_MARKS), "max_position_embeddings": max(64, length)}
    sizes |= {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}  # the marks' own
    kind = found if found in transformers_package().MODEL_FOR_CAUSAL_LM_MAPPING else container_of(found)
    return shrunk(kind, {name: size for name, size in sizes.items() if hasattr(found, name)})


def shrunk(kind: type, overrides: Mapping[str, Any] | None = None) -> Any:
    """Create a small configuration of a class, also if nested. ``overrides`` replace the table's values."""
    default: Any = kind()
    values = {name: value for name, value in SMALL.items() if _is_size(default, name)}
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = HEADS  # each head derives its own keys from the compressed ones
    for name in dir(default):
        if ("drop" in name or "jitter" in name) and isinstance(_value(default, name), float):
            values[name] = 0.0  # two runs would differ
    if "mrope_section" in (getattr(kind, "ignore_keys_at_rope_validation", None) or ()):
        rope = {**ROPE, **(_value(default, "rope_parameters") or {})}
        pairs = int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
        section = [pairs // 3, pairs // 3, pairs - 2 * (pairs // 3)]
        values["rope_parameters"] = {**rope, "mrope_section": section}
    for name, inner in (getattr(kind, "sub_configs", None) or {}).items():
        part = getattr(default, name, None)
        if part is not None:
            values[name] = shrunk(type(part) if inner.__name__ == "AutoConfig" else inner)
    values.update(SPECIAL.get(kind.__name__, {}))
    values.update(overrides or {})
    config: Any = kind(**values)
    config.update({"_experts_implementation": "eager"})  # grouped matrix products of experts need 16 or 32 bits
    return config


def _is_size(default: Any, name: str) -> bool:
    kind = type(default)
    known = hasattr(kind, name) and not isinstance(getattr(kind, name), property)
    return known and (name in NEEDED or _value(default, name) is not None)


def _value(config: Any, name: str) -> Any:
    """Return an attribute, or False if it differs between layers, which some configurations refuse to read."""
    try:
        return getattr(config, name, None)
    except Exception:
        return False


def container_of(kind: type) -> type:
    """Return the configuration class of a complete model: this class, or the class of its module that contains it."""
    for other in classes_of(kind.__module__).values():
        if kind in (getattr(other, "sub_configs", None) or {}).values():
            return container_of(other)
    return kind


def write_tiny(directory: Path, family: str, length: int, seed: int) -> None:
    """Write a small random causal model of a family, and a byte tokenizer with a chat template, unless they exist.

    Raises ValueError if there is no such family with a causal model.
    """
    if (directory / "config.json").is_file():
        return
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = tiny_of_bytes(family, length)
            model = transformers_package().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except LookupError as error:
        raise ValueError(error.args[0]) from error
    partial = directory.with_name(f"{directory.name}.{os.getpid()}.partial")
    model.save_pretrained(partial)
    byte_tokenizer().save_pretrained(partial)
    try:
        partial.rename(directory)
    except OSError:  # another process was first
        shutil.rmtree(partial)


def byte_tokenizer() -> Any:
    """Return a tokenizer of transformers with one token for each byte, three special tokens and a chat template."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {mark: number for number, mark in enumerate((*BYTE_MARKS, *alphabet))}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers_package().PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=BYTE_MARKS[2],
        pad_token=BYTE_MARKS[0],
        additional_special_tokens=[BYTE_MARKS[1]],
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def keeps_records_apart(config: Any) -> bool:
    """Return ``True`` if packed records of a family do not see each other when their position_ids start again at 0.

    Two rows of a tiny model of the family differ in their first record; the logits of the second one must not. The
    result is also ``True`` for a family whose small copy cannot be made.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            torch.manual_seed(1234)
            model = transformers_package().AutoModelForCausalLM.from_config(shrunk(type(config))).double().eval()
        except Exception:  # any result of a configuration's values
            return True
        rows = torch.arange(16).repeat(2, 1) % 7 + 1
        rows[1, :8] = rows[1, :8] % 5 + 3
        positions = torch.arange(8).repeat(2)
        try:
            one, other = (model(row[None], position_ids=positions[None], use_cache=False).logits for row in rows)
        except (TypeError, ValueError):  # it takes no position_ids
            return False
        first, second = (one - other).abs().split(8, dim=1)
        return bool(second.max() <= 1e-6 * first.max())


# Values that the table cannot express: sizes that depend on each other, and lists of layer types.
SPECIAL: dict[str, dict[str, Any]] = {
    "OPTConfig": {"word_embed_proj_dim": 32},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "Dots1Config": {"n_shared_experts": 1},
    "EmbeddingGemma2TextConfig": {"global_head_dim": HEAD, "num_global_key_value_heads": KEY_VALUE_HEADS},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", *["sparse"] * 3]},
    "Ernie4_5_VLMoeTextConfig": {"moe_intermediate_size": [HIDDEN, HIDDEN]},
    "EsmcConfig": {"num_key_value_heads": HEADS},
    "Glm5NextTextConfig": {"index_kpool": 2, "qk_rope_head_dim": 0},
    "PaddleOCRTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "GraniteMoeHybridConfig": {"mamba_d_head": 16},
    "KimiLinearConfig": {"num_hidden_layers": 5},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "NeoMMEConfig": {"head_dim": 16},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": HIDDEN},
    "Qwen4ExpTextConfig": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": 4},
        **{"indexer_compress_ratio": 2, "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8},
        "split_ngram_parts": 1,
    },
    "Step3p7TextConfig": {"sliding_window": 4},
}

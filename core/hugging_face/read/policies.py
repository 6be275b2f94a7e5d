"""Policies: rules, as data, that split families without their own plan. A plugin's ``custom_policy`` is one of these.

A name in a rule is the end of a module's or parameter's path; ``*`` matches a number. The longest matching name wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.hugging_face.read.plan import Style


@dataclass(frozen=True)
class Policy:
    """Rules of one family.

    Args:
        rules: Module or parameter -> name of a style, or a Style.
        divided: Module -> its attributes that count heads or features in the full model; each rank's value is divided
            by tp. The first attribute counts heads.
        per_head: Module -> keyword arguments of its forward that hold one value per head.
    """

    rules: Mapping[str, str | Style]
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    per_head: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def longest_fit(name: str, ends: Iterable[str]) -> str | None:
    """Return the longest of ``ends`` that a full name ends in, compared part by part, or ``None`` if no end matches."""
    parts = re.sub(r"\.\d+(?=\.|$)", ".*", f".{name}")
    return max((end for end in ends if parts.endswith(f".{end}")), key=len, default=None)


def _rules(**modules: str) -> dict[str, str | Style]:
    return {name: style for style, names in modules.items() for name in names.split()}


_GPT2 = Policy(
    _rules(
        embedding_rowwise="wte",
        colwise_gather_output="lm_head",
        conv1d_packed_3_colwise="attn.c_attn",
        conv1d_packed_colwise="crossattention.c_attn",
        conv1d_colwise="crossattention.q_attn mlp.c_fc",
        conv1d_rowwise="attn.c_proj crossattention.c_proj mlp.c_proj",
    ),
    {
        **dict.fromkeys(("attn", "crossattention"), ("num_heads", "split_size")),
        **dict.fromkeys(("c_attn", "q_attn", "c_fc"), ("nf",)),  # output width of Conv1D
    },
)
_GPTJ = Policy(
    _rules(
        embedding_rowwise="wte",
        colwise_gather_output="lm_head",
        colwise="attn.q_proj attn.k_proj attn.v_proj mlp.fc_in",
        rowwise="attn.out_proj mlp.fc_out",
    ),
    {"attn": ("num_attention_heads",)},
)
_BERT = Policy(
    _rules(
        embedding_rowwise="embeddings.word_embeddings",
        colwise_gather_output="cls.predictions.decoder",
        colwise="cls.predictions.bias self.query self.key self.value intermediate.dense",  # the bias is the decoder's
        rowwise="attention.output.dense output.dense crossattention.output.dense",
    )
)
_ROBERTA = Policy({**_BERT.rules, **_rules(colwise_gather_output="lm_head.decoder", colwise="lm_head.bias")})
_ALBERT = Policy(
    _rules(
        embedding_rowwise="embeddings.word_embeddings",
        colwise_gather_output="predictions.decoder",
        colwise="predictions.bias attention.query attention.key attention.value albert_layers.*.ffn",
        rowwise="attention.dense albert_layers.*.ffn_output",
    )
)
_VIT = Policy(
    _rules(colwise="attention.q_proj attention.k_proj attention.v_proj mlp.fc1", rowwise="attention.o_proj mlp.fc2")
)
_T5 = Policy(
    _rules(
        embedding_rowwise="shared embed_tokens",
        colwise_gather_output="lm_head",
        colwise="SelfAttention.q SelfAttention.k SelfAttention.v EncDecAttention.q EncDecAttention.k EncDecAttention.v "
        "DenseReluDense.wi DenseReluDense.wi_0 DenseReluDense.wi_1",
        rowwise="SelfAttention.o EncDecAttention.o DenseReluDense.wo",
        heads_of_embedding="relative_attention_bias",
    ),
    dict.fromkeys(("SelfAttention", "EncDecAttention"), ("n_heads", "inner_dim")),
)
_OPT = Policy(
    _rules(
        embedding_rowwise="decoder.embed_tokens",
        colwise_gather_output="lm_head",
        colwise="self_attn.q_proj self_attn.k_proj self_attn.v_proj layers.*.fc1",
        rowwise="self_attn.out_proj layers.*.fc2",
    ),
    {"self_attn": ("num_heads",)},
)
_BLOOM = Policy(
    _rules(
        embedding_rowwise="word_embeddings",
        colwise_gather_output="lm_head",
        colwise="self_attention.query_key_value mlp.dense_h_to_4h",
        rowwise="self_attention.dense mlp.dense_4h_to_h",
    ),
    {"self_attention": ("num_heads", "hidden_size", "split_size")},
    {"self_attention": ("alibi",)},
)
# With ALiBi, falcon adds the biases to its mask, one per head.
_FALCON = Policy(
    _BLOOM.rules, {"self_attention": ("num_heads", "num_kv_heads")}, {"self_attention": ("alibi", "attention_mask")}
)
# All queries share one key and one value head: every rank computes both, and its own queries.
_FALCON_MULTI_QUERY = Policy(
    {**_BLOOM.rules, "self_attention.query_key_value": Style(before="copy", after="select", partial=True, shared=2)},
    {"self_attention": ("num_heads",)},
    _FALCON.per_head,
)
_ENCODER_DECODER = _rules(
    embedding_rowwise="shared encoder.embed_tokens",
    colwise_gather_output="proj_out",
    colwise="encoder_attn.q_proj encoder_attn.k_proj encoder_attn.v_proj",
    rowwise="encoder_attn.out_proj",
)
# The state space of a feature depends on that feature only; x_proj combines all features, so its output is summed. The
# convolution and the time step's projection are never called: the family reads their weights directly.
_MAMBA = Policy(
    {
        **_rules(
            embedding_rowwise="embeddings",
            colwise_gather_output="lm_head",
            packed_colwise="mixer.in_proj",
            rowwise_copied="mixer.x_proj",
            rowwise="mixer.out_proj",
        ),
        "mixer.conv1d": Style(weight=-3, bias=-1),
        "mixer.dt_proj": Style(weight=-2, bias=-1),
        "mixer.A_log": Style(weight=-2),
        "mixer.D": Style(weight=-1, bias=-1),
    }
)
_WHISPER = Policy({**_OPT.rules, **_ENCODER_DECODER}, dict.fromkeys(("self_attn", "encoder_attn"), ("num_heads",)))
_SAM = Policy(
    _rules(packed_3_colwise="attn.qkv", colwise="q_proj k_proj v_proj mlp.lin1", rowwise="attn.proj out_proj mlp.lin2"),
    dict.fromkeys(
        ["attn", "self_attn", "cross_attn_token_to_image", "cross_attn_image_to_token", "final_attn_token_to_image"],
        ("num_attention_heads",),
    ),
)
# The vision tower's attention derives the head size from its input's width, so each rank computes all heads; only the
# weights are split.
_QUERIES_AND_IMAGE = _rules(
    colwise_gather_output="self_attn.qkv",
    rowwise_split_input="self_attn.projection",
    colwise="attention.query attention.key attention.value intermediate_query.dense intermediate.dense "
    "vision_model.encoder.layers.*.mlp.fc1",
    rowwise="attention.output.dense crossattention.output.dense output_query.dense output.dense "
    "vision_model.encoder.layers.*.mlp.fc2",
)
_BLIP_2 = Policy(
    {**_OPT.rules, **_T5.rules, **_QUERIES_AND_IMAGE},
    {**_T5.divided, "decoder.layers.*.self_attn": ("num_heads",)},
)
POLICIES: dict[str, Policy] = {
    "gpt2": _GPT2,
    "gptj": _GPTJ,
    "bert": _BERT,
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _ROBERTA),
    "albert": _ALBERT,
    "vit": _VIT,
    "t5": _T5,
    "opt": _OPT,
    "bloom": _BLOOM,
    "falcon": _FALCON,
    "falcon, multi-query": _FALCON_MULTI_QUERY,
    **dict.fromkeys(("whisper", "bart", "mbart", "pegasus"), _WHISPER),  # encoders and decoders alike
    "sam": _SAM,
    **dict.fromkeys(("mamba", "falcon_mamba"), _MAMBA),
    "blip-2": _BLIP_2,
}


def policy_of(config: Any) -> Policy | None:
    """Return the policy for a configuration, or ``None`` if its family has no policy."""
    if config.model_type == "falcon" and config.multi_query and not config.new_decoder_architecture:
        return POLICIES["falcon, multi-query"]
    return POLICIES.get(config.model_type)

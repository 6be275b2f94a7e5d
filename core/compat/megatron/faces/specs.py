"""Layer specs of a GPT, which say that it is built of our layers."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from core.compat.megatron.faces.blocks import local_layer
from core.compat.megatron.faces.refusals import arguments

_SAYS = "num_experts=None moe_grouped_gemm=False qk_layernorm=False !multi_latent_attention=False|None "
_LEGACY = "!moe_use_legacy_grouped_gemm=False|None normalization=None !qk_l2_norm=False|None -use_te_op_fuser=False "
_KITCHEN = "!use_kitchen=False !use_kitchen_attention=False !kitchen_attention_backend='sdpa' "
_FURTHER = "-use_te_activation_func=False -fallback_to_eager_attn=False -mla_down_proj_fusion=False"
SPEC = arguments(f"{_SAYS}!fp8=None {_LEGACY}{_KITCHEN}{_FURTHER}")


@SPEC
def get_gpt_layer_local_spec(num_experts: Any, moe_grouped_gemm: Any, qk_layernorm: Any, normalization: Any) -> Any:
    """Our transformer layer. What it holds is decided by the config; GPTModel refuses a spec that says otherwise."""
    says = {"num_moe_experts": num_experts, "moe_grouped_gemm": bool(moe_grouped_gemm)} if num_experts else {}
    says |= {"qk_layernorm": bool(qk_layernorm)} | ({} if normalization is None else {"normalization": normalization})
    spec = local_layer(has_experts=bool(num_experts), qk_layernorm=bool(qk_layernorm))
    spec.metainfo |= says
    return spec


def get_gpt_layer_with_transformer_engine_spec(*args: Any, **kwargs: Any) -> Any:
    """The same layer as get_gpt_layer_local_spec, with a warning: nothing of TransformerEngine is used."""
    _say_no_transformer_engine()
    return get_gpt_layer_local_spec(*args, **kwargs)


@functools.cache
def _say_no_transformer_engine() -> None:
    warnings.warn(
        "a TransformerEngine layer was asked for; core.compat.megatron builds its own layers, which compute the same",
        stacklevel=4,
    )


@arguments("config use_transformer_engine normalization=None !qk_l2_norm=False|None -vp_stage=None -pp_rank=None")
def get_gpt_decoder_block_spec(config: Any, use_transformer_engine: bool, normalization: str | None) -> Any:
    """The layers of a stage, dense or with experts as config.moe_layer_freq says; they follow from the config."""
    spec = get_gpt_layer_with_transformer_engine_spec if use_transformer_engine else get_gpt_layer_local_spec
    return spec(config.num_moe_experts, config.moe_grouped_gemm, config.qk_layernorm, normalization=normalization)

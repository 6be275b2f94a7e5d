"""Layer specs, which say that a GPT is built of our layers, and which layers a pipeline stage holds."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from core.compat.arguments import arguments
from core.compat.megatron.faces.modules import ModuleSpec
from core.tensor_parallel.mappings import resolve_groups
from core.transformer.transformer_layer import TransformerLayer

ADVICE = {
    "multi_latent_attention": "core.hugging_face splits a transformers model that has it",
    "fp8": "train in bf16",
    "qk_l2_norm": "qk_layernorm=True is what there is",
    "moe_use_legacy_grouped_gemm": "moe_grouped_gemm=True groups the experts' products",
    **dict.fromkeys(("use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"), "torch computes attention"),
}
_SAYS = "num_experts=None moe_grouped_gemm=False qk_layernorm=False !multi_latent_attention=False|None "
_LEGACY = "!moe_use_legacy_grouped_gemm=False|None normalization=None !qk_l2_norm=False|None -use_te_op_fuser=False "
_KITCHEN = "!use_kitchen=False !use_kitchen_attention=False !kitchen_attention_backend='sdpa' "
_FURTHER = "-use_te_activation_func=False -fallback_to_eager_attn=False -mla_down_proj_fusion=False"
SPEC = arguments(f"{_SAYS}!fp8=None {_LEGACY}{_KITCHEN}{_FURTHER}", ADVICE)


@SPEC
def get_gpt_layer_local_spec(num_experts: Any, moe_grouped_gemm: Any, qk_layernorm: Any, normalization: Any) -> Any:
    """Our transformer layer. What it holds is decided by the config; GPTModel refuses a spec that says otherwise."""
    says = {"num_moe_experts": num_experts, "qk_layernorm": bool(qk_layernorm)}
    says |= {} if num_experts is None else {"moe_grouped_gemm": bool(moe_grouped_gemm)}
    says |= {} if normalization is None else {"normalization": normalization}
    return ModuleSpec(module=TransformerLayer, metainfo=says)


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


@arguments(
    "config use_transformer_engine normalization=None !qk_l2_norm=False|None -vp_stage=None -pp_rank=None", ADVICE
)
def get_gpt_decoder_block_spec(config: Any, use_transformer_engine: bool, normalization: str | None) -> Any:
    """The layers of a stage, dense or with experts as config.moe_layer_freq says; they follow from the config."""
    spec = get_gpt_layer_with_transformer_engine_spec if use_transformer_engine else get_gpt_layer_local_spec
    return spec(config.num_moe_experts, config.moe_grouped_gemm, config.qk_layernorm, normalization=normalization)


def check_spec(spec: Any, config: Any) -> None:
    """ValueError for a spec that is not of this module, or says otherwise than the config."""
    if not isinstance(spec, ModuleSpec) or spec.module is not TransformerLayer:
        raise ValueError(
            "transformer_layer_spec must come from get_gpt_layer_local_spec() or a function beside it: GPTModel is "
            "built of our layers. Put layers of your own into a module of your own, with the layers of tensor_parallel"
        )
    for name, value in spec.metainfo.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"the layer spec says {name}={value!r} and the config {getattr(config, name)!r}; make them agree, the "
                "config decides"
            )


def get_num_layers_to_build(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """How many layers a stage has."""
    return len(layers_of_stage(config, pp_rank, vp_stage))


def get_transformer_layer_offset(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """The number of a stage's first layer, counted from 0 over the whole model."""
    return layers_of_stage(config, pp_rank, vp_stage).start


def layers_of_stage(config: Any, pp_rank: int | None, vp_stage: int | None) -> range:
    """The layers that a rank, or one chunk of it, holds: even shares, beside those that the ends are given."""
    rank = resolve_groups(None).rank("pp") if pp_rank is None else pp_rank
    pp, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    if (chunks is None) != (vp_stage is None):
        raise ValueError(f"vp_stage is {vp_stage} and virtual_pipeline_model_parallel_size {chunks}; give both or none")
    rest = config.num_layers - (first or 0) - (last or 0)
    stages = pp - (first is not None) - (last is not None)
    if (stages == 0 and rest) or rest < 0 or (stages and rest % stages):
        raise ValueError(
            f"{config.num_layers} layers do not divide over pipeline_model_parallel_size {pp} with "
            f"num_layers_in_first_pipeline_stage {first} and num_layers_in_last_pipeline_stage {last}"
        )
    counts = [rest // stages if stages else 0] * pp
    counts[0] = counts[0] if first is None else first
    counts[-1] = counts[-1] if last is None else last
    if any(count % (chunks or 1) for count in counts):
        raise ValueError(f"ranks hold {counts} layers, which do not divide into {chunks} chunks each")
    share = [count // (chunks or 1) for count in counts]
    start = (vp_stage or 0) * sum(share) + sum(share[:rank])
    return range(start, start + share[rank])

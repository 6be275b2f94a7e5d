"""GPTModel with Megatron's arguments, over our layers; layer specs that choose them."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from core.compat.megatron.faces.modules import MegatronModule, ModuleSpec
from core.models.gpt import GPTModel as OurGPTModel
from core.process_groups import ProcessGroups
from core.tensor_parallel import gather_from_tensor_model_parallel_region
from core.tensor_parallel.mappings import resolve_groups
from core.transformer.transformer_layer import TransformerLayer


@dataclass
class PackedSeqParams:
    """Documents that share a row of tokens, by the numbers of tokens before each of them and after the last."""

    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None
    local_cp_size: int | None = None
    cp_group: Any = None
    total_tokens: int | None = None
    seq_idx: Tensor | None = None


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool | None = False,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    **more: Any,
) -> ModuleSpec:
    """Our transformer layer. What it holds is decided by the config; GPTModel refuses a spec that says otherwise."""
    odd = {"multi_latent_attention": multi_latent_attention, "fp8": fp8, "qk_l2_norm": qk_l2_norm, **more}
    odd["moe_use_legacy_grouped_gemm"] = moe_use_legacy_grouped_gemm
    for name, value in odd.items():
        if value and (name, value) != ("kitchen_attention_backend", "sdpa"):
            raise ValueError(f"get_gpt_layer_local_spec({name}={value!r}) is not built: our layer is the one there is")
    says = {"num_moe_experts": num_experts, "qk_layernorm": bool(qk_layernorm)}
    if num_experts is not None:
        says["moe_grouped_gemm"] = bool(moe_grouped_gemm)
    return ModuleSpec(
        module=TransformerLayer, metainfo=says | ({} if normalization is None else {"normalization": normalization})
    )


def get_gpt_layer_with_transformer_engine_spec(*args: Any, **kwargs: Any) -> ModuleSpec:
    """The same layer as get_gpt_layer_local_spec, with a warning: nothing of TransformerEngine is used."""
    _say_no_transformer_engine()
    return get_gpt_layer_local_spec(*args, **kwargs)


@functools.cache
def _say_no_transformer_engine() -> None:
    warnings.warn(
        "a TransformerEngine layer was asked for; core.compat.megatron builds its own layers, which compute the same",
        stacklevel=4,
    )


def get_gpt_decoder_block_spec(
    config: Any,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> ModuleSpec:
    """The layers of a stage, dense or with experts as config.moe_layer_freq says; they follow from the config."""
    spec = get_gpt_layer_with_transformer_engine_spec if use_transformer_engine else get_gpt_layer_local_spec
    return spec(
        config.num_moe_experts,
        config.moe_grouped_gemm,
        config.qk_layernorm,
        normalization=normalization,
        qk_l2_norm=qk_l2_norm,
    )


def get_num_layers_to_build(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """How many layers a stage has."""
    return len(layers_of_stage(config, _pp_rank(pp_rank), vp_stage))


def get_transformer_layer_offset(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """The number of a stage's first layer, counted from 0 over the whole model."""
    return layers_of_stage(config, _pp_rank(pp_rank), vp_stage).start


def _pp_rank(given: int | None) -> int:
    return resolve_groups(None).rank("pp") if given is None else given


def layers_of_stage(config: Any, pp_rank: int, vp_stage: int | None) -> range:
    """The layers that a rank, or one chunk of it, holds: even shares, beside those that the ends are given."""
    pp, vp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    if (vp is None) != (vp_stage is None):
        raise ValueError(f"vp_stage is {vp_stage} and virtual_pipeline_model_parallel_size {vp}; give both or neither")
    chunks = vp or 1
    rest = config.num_layers - (first or 0) - (last or 0)
    stages = pp - (first is not None) - (last is not None)
    if (stages == 0 and rest) or rest < 0 or (stages and rest % stages):
        raise ValueError(
            f"{config.num_layers} layers do not divide over pipeline_model_parallel_size {pp} with "
            f"num_layers_in_first_pipeline_stage {first} and num_layers_in_last_pipeline_stage {last}"
        )
    even = rest // stages if stages else 0
    counts = [even] * pp
    counts[0] = even if first is None else first
    counts[-1] = counts[-1] if last is None else last
    if any(count % chunks for count in counts):
        raise ValueError(f"ranks hold {counts} layers, which do not divide into {chunks} chunks each")
    per_chunk = [count // chunks for count in counts]
    start = (vp_stage or 0) * sum(per_chunk) + sum(per_chunk[:pp_rank])
    return range(start, start + per_chunk[pp_rank])


class GPTModel(OurGPTModel, MegatronModule):
    """core.models.gpt.GPTModel, made and called as Megatron's.

    transformer_layer_spec: one of this module's; layers of your own are put into a model of your own. vocab_size: of
    the embedding, padded or not. parallel_output: logits stay split over tensor parallelism. Weights are drawn by name:
    the same ones in every layout, and others than Megatron's. `config` is the one given, callbacks are read from it.
    """

    def __init__(
        self,
        config: Any,
        transformer_layer_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: Any = None,
        pg_collection: ProcessGroups | None = None,
        vp_stage: int | None = None,
    ) -> None:
        _refuse(
            "GPTModel",
            fp16_lm_cross_entropy=(fp16_lm_cross_entropy, False, "the loss is computed in fp32"),
            rotary_percent=(rotary_percent, 1.0, "all channels of a head are turned"),
            rope_scaling=(rope_scaling, False, "positions are not rescaled"),
            scatter_embedding_sequence_parallel=(scatter_embedding_sequence_parallel, True, "the sequence is split"),
            seq_len_interpolation_factor=(seq_len_interpolation_factor, None, "positions are not interpolated"),
            mtp_block_spec=(mtp_block_spec, None, "multi-token prediction is not built"),
        )
        _check_spec(transformer_layer_spec, config)
        groups = resolve_groups(pg_collection)
        OurGPTModel.__init__(
            self,
            config.ours(
                vocab_size=vocab_size,
                max_sequence_length=max_sequence_length,
                share_embeddings_and_output_weights=share_embeddings_and_output_weights,
                position_embedding_type=position_embedding_type,
                rotary_base=float(rotary_base),
            ),
            groups,
            pre_process=pre_process,
            post_process=post_process,
            layer_numbers=layers_of_stage(config, groups.rank("pp"), vp_stage),
        )
        self.config = config
        self.vp_stage = vp_stage
        self.parallel_output = parallel_output
        self.position_embedding_type = position_embedding_type
        self.model_type = None

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: Any = None,
        loss_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        output_processor: Any = None,
        output_processor_context: Any = None,
    ) -> Tensor:
        """Loss of each token [b, s] given labels, else logits [b, s, vocab / tp]; hidden before the last stage.

        attention_mask: None, or the causal one [.., s, s], True where a position is not seen; any other is refused.
        packed_seq_params: documents of one row [1, t] by cu_seqlens_q. position_ids: read by learned positions.
        loss_mask: has no part in the losses of tokens. runtime_gather_output: True for logits of the whole vocabulary.
        """
        _refuse(
            "GPTModel.forward",
            decoder_input=(decoder_input, None, "embeddings come from input_ids"),
            inference_context=(inference_context, None, "core.generate samples"),
            inference_params=(inference_params, None, "core.generate samples"),
            extra_block_kwargs=(extra_block_kwargs or None, None, "our layers take none"),
            padding_mask=(padding_mask, None, "leave padded tokens out of the loss"),
            output_processor=(output_processor, None, "process what forward returns"),
        )
        check_causal(attention_mask)
        documents = None
        if packed_seq_params is not None:
            documents, packed_positions = packed_documents(packed_seq_params, self.cp_group)
            position_ids = packed_positions if self.position_embedding_type == "rope" else position_ids
        elif self.position_embedding_type == "rope":
            position_ids = None
        output = OurGPTModel.forward(
            self,
            input_ids,
            labels if self.post_process else None,
            position_ids=position_ids if self.pre_process or self.position_embedding_type == "rope" else None,
            document_ids=documents,
        )
        if not self.post_process or labels is not None:
            return output
        gathers = not self.parallel_output if runtime_gather_output is None else runtime_gather_output
        if gathers and self.output_layer.tp_size > 1:
            output = gather_from_tensor_model_parallel_region(output, self.output_layer.tp_group)
        return rearrange(output, "s b v -> b s v").contiguous()


def _refuse(where: str, **arguments: tuple[Any, Any, str]) -> None:
    for name, (value, default, why) in arguments.items():
        if value is not default and value != default:
            raise ValueError(f"{where}({name}=...) is not supported, leave it at {default!r}: {why}")


def _check_spec(spec: Any, config: Any) -> None:
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


def check_causal(mask: Tensor | None) -> None:
    """ValueError for an attention mask that is not the causal one. Waits for a GPU; None is quicker."""
    if mask is None:
        return
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype != torch.bool or not bool((mask == causal).all()):
        raise ValueError(
            f"attention_mask {list(mask.shape)} is not the causal one (bool, True above the diagonal), and no other is "
            "built; pass None, and packed_seq_params where documents share a row"
        )


def packed_documents(packed: Any, cp_group: Any) -> tuple[Tensor, Tensor]:
    """Document number and position of each token [1, t] of rows that are packed by cu_seqlens."""
    if packed.qkv_format not in (None, "thd"):
        raise ValueError(f"packed_seq_params.qkv_format is {packed.qkv_format!r}; documents of one row are 'thd'")
    if cp_group is not None and cp_group.size() > 1:
        raise ValueError(
            "packed_seq_params with context parallelism is not built; core.models.GPTModel takes document_ids that "
            "get_batch_on_this_cp_rank has split"
        )
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    token = torch.arange(int(ends[-1]), device=ends.device)
    document = torch.searchsorted(ends[1:].long(), token, right=True)
    return document.unsqueeze(0), (token - ends.long()[document]).unsqueeze(0)

"""GPTModel with Megatron's arguments, over our layers."""

from __future__ import annotations

from typing import Any

from einops import rearrange
from torch import Tensor

from core.checkpoint.transformers_files import load_pretrained, save_pretrained
from core.compat.megatron.faces.blocks import check_spec
from core.compat.megatron.faces.groups import layers_of_stage
from core.compat.megatron.faces.modules import MegatronModule
from core.compat.megatron.faces.packed import check_causal, packed_documents
from core.compat.megatron.faces.refusals import arguments
from core.models.gpt import GPTModel as OurGPTModel
from core.tensor_parallel import gather_from_tensor_model_parallel_region
from core.tensor_parallel.mappings import resolve_groups


class GPTModel(OurGPTModel, MegatronModule):
    """core.models.gpt.GPTModel, made and called as Megatron's.

    transformer_layer_spec: one of models.gpt.gpt_layer_specs; layers of your own are put into a model of your own.
    vocab_size: of the embedding, padded or not. parallel_output: logits stay split over tensor parallelism. Weights are
    drawn by name: the same ones in every layout, and others than Megatron's. `config` is the one given, callbacks are
    read from it.
    """

    @arguments(
        "self config transformer_layer_spec vocab_size max_sequence_length pre_process=True post_process=True "
        "!fp16_lm_cross_entropy=False parallel_output=True share_embeddings_and_output_weights=False "
        "position_embedding_type='learned_absolute' !rotary_percent=1.0 rotary_base=10000 !rope_scaling=False "
        "-rope_scaling_factor=8.0 !scatter_embedding_sequence_parallel=True !seq_len_interpolation_factor=None "
        "!mtp_block_spec=None pg_collection=None vp_stage=None * !logit_dtype=None"
    )
    def __init__(self, config: Any, transformer_layer_spec: Any, rotary_base: float, **model: Any) -> None:
        own = {name: model.pop(name) for name in ("pre_process", "post_process")}
        groups, vp_stage = resolve_groups(model.pop("pg_collection")), model.pop("vp_stage")
        parallel_output = model.pop("parallel_output")
        numbers = layers_of_stage(config, groups.rank("pp"), vp_stage)
        check_spec(transformer_layer_spec, config, numbers)
        ours = config.ours(groups, rotary_base=float(rotary_base), **model)
        OurGPTModel.__init__(self, ours, groups, layer_numbers=numbers, **own)
        self.our_config, self.config = self.config, config
        self.vp_stage, self.parallel_output = vp_stage, parallel_output
        self.position_embedding_type: str = model["position_embedding_type"]
        self.model_type = None

    @arguments(
        "self input_ids position_ids=None attention_mask=None !decoder_input=None labels=None !inference_context=None "
        "packed_seq_params=None !extra_block_kwargs=None runtime_gather_output=None * !inference_params=None "
        "-loss_mask=None !padding_mask=None !output_processor=None !output_processor_context=None"
    )
    def forward(
        self, input_ids: Tensor, position_ids: Any, attention_mask: Any, labels: Any, packed_seq_params: Any,
        runtime_gather_output: bool | None,
    ) -> Tensor:  # fmt: skip
        """Loss of each token [b, s] given labels, else logits [b, s, vocab / tp]; hidden before the last stage.

        attention_mask: None, or the causal one [.., s, s], True where a position is not seen; any other is refused.
        packed_seq_params: documents of one row [1, t], by cu_seqlens_q. position_ids: read by learned positions.
        loss_mask: has no part in the losses of tokens. runtime_gather_output: True for the whole vocabulary's logits.
        """
        check_causal(attention_mask)
        is_rope = self.position_embedding_type == "rope"
        documents, counted = None, None
        if packed_seq_params is not None:
            documents, counted = packed_documents(packed_seq_params, self.cp_group, *input_ids.shape)
        positions = counted if is_rope else position_ids if self.pre_process else None
        targets = labels if self.post_process else None
        output = OurGPTModel.forward(self, input_ids, targets, position_ids=positions, document_ids=documents)
        if not self.post_process or labels is not None:
            return output
        gathers = not self.parallel_output if runtime_gather_output is None else runtime_gather_output
        if gathers and self.output_layer.tp_size > 1:
            output = gather_from_tensor_model_parallel_region(output, self.output_layer.tp_group)
        return rearrange(output, "s b v -> b s v").contiguous()

    save_pretrained, load_pretrained = save_pretrained, load_pretrained

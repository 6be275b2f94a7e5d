"""GPTModel with Megatron's arguments, over our layers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from core.checkpoint.transformers_files import check_same_model, read_transformers, write_transformers
from core.compat.arguments import arguments
from core.compat.megatron.faces.modules import MegatronModule
from core.compat.megatron.faces.specs import check_spec, layers_of_stage
from core.models.gpt import GPTModel as OurGPTModel
from core.tensor_parallel import gather_from_tensor_model_parallel_region
from core.tensor_parallel.mappings import group_size, resolve_groups

ADVICE = {
    "fp16_lm_cross_entropy": "the loss is computed in fp32",
    "rotary_percent": "all channels of a head are turned",
    "rope_scaling": "positions are not rescaled",
    "rope_scaling_factor": "positions are not rescaled",
    "scatter_embedding_sequence_parallel": "the sequence is split where sequence_parallel says so",
    "seq_len_interpolation_factor": "positions are not interpolated",
    "mtp_block_spec": "multi-token prediction is not built",
    "logit_dtype": "cast the logits",
    "decoder_input": "embeddings come from input_ids",
    **dict.fromkeys(("inference_context", "inference_params"), "core.generate samples"),
    "extra_block_kwargs": "our layers take none",
    "padding_mask": "leave padded tokens out of the loss",
    **dict.fromkeys(("output_processor", "output_processor_context"), "process what forward returns"),
}


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
    tokens_per_sample: int | None = None
    pad_between_seqs: bool | None = None


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
        "!mtp_block_spec=None pg_collection=None vp_stage=None * !logit_dtype=None",
        ADVICE,
    )
    def __init__(
        self,
        config: Any,
        transformer_layer_spec: Any,
        pre_process: bool,
        post_process: bool,
        parallel_output: bool,
        rotary_base: float,
        pg_collection: Any,
        vp_stage: int | None,
        **model: Any,
    ) -> None:
        check_spec(transformer_layer_spec, config)
        groups = resolve_groups(pg_collection)
        OurGPTModel.__init__(
            self,
            config.ours(rotary_base=float(rotary_base), **model),
            groups,
            pre_process=pre_process,
            post_process=post_process,
            layer_numbers=layers_of_stage(config, groups.rank("pp"), vp_stage),
        )
        self.our_config, self.config = self.config, config
        self.vp_stage = vp_stage
        self.parallel_output = parallel_output
        self.position_embedding_type: str = model["position_embedding_type"]
        self.model_type = None

    @arguments(
        "self input_ids position_ids=None attention_mask=None !decoder_input=None labels=None !inference_context=None "
        "packed_seq_params=None !extra_block_kwargs=None runtime_gather_output=None * !inference_params=None "
        "-loss_mask=None !padding_mask=None !output_processor=None !output_processor_context=None",
        ADVICE,
    )
    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        packed_seq_params: PackedSeqParams | None,
        runtime_gather_output: bool | None,
    ) -> Tensor:
        """Loss of each token [b, s] given labels, else logits [b, s, vocab / tp]; hidden before the last stage.

        attention_mask: None, or the causal one [.., s, s], True where a position is not seen; any other is refused.
        packed_seq_params: documents of one row [1, t], by cu_seqlens_q. position_ids: read by learned positions.
        loss_mask: has no part in the losses of tokens. runtime_gather_output: True for the whole vocabulary's logits.
        """
        check_causal(attention_mask)
        is_rope = self.position_embedding_type == "rope"
        documents, counted = None, None
        if packed_seq_params is not None:
            documents, counted = packed_documents(packed_seq_params, self.cp_group, input_ids)
        positions = counted if is_rope else position_ids if self.pre_process else None
        targets = labels if self.post_process else None
        output = OurGPTModel.forward(self, input_ids, targets, position_ids=positions, document_ids=documents)
        if not self.post_process or labels is not None:
            return output
        gathers = not self.parallel_output if runtime_gather_output is None else runtime_gather_output
        if gathers and self.output_layer.tp_size > 1:
            output = gather_from_tensor_model_parallel_region(output, self.output_layer.tp_group)
        return rearrange(output, "s b v -> b s v").contiguous()

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the model for Hugging Face's transformers, as llama, gpt2 or arcee. Of a whole model, in one process.

        ValueError for a part of a model, and for what none of the layouts has.
        """
        self._check_whole("save_pretrained")
        write_transformers(Path(directory), self.our_config, self.state_dict())

    def load_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Take the weights of a directory that transformers has written. Of a whole model, in one process.

        ValueError for a part of a model, and for a config.json that tells another model than this.
        """
        self._check_whole("load_pretrained")
        config, state = read_transformers(Path(directory))
        check_same_model(self.our_config, config)
        self.load_state_dict(state)

    def _check_whole(self, what: str) -> None:
        if not (self.pre_process and self.post_process and self.output_layer.tp_size == 1):
            raise ValueError(
                f"{what} is for a whole model, and this is a part of one; save with dist_checkpointing.save, and load "
                "in one process, or the other way round: it loads at any layout"
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


def packed_documents(packed: PackedSeqParams, cp_group: Any, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Document number and position of each token [1, t] of a row that is packed by cu_seqlens; padding may follow.

    Raises ValueError for keys that are packed otherwise than queries, and for ends that are not the row's.
    """
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    keys = packed.cu_seqlens_kv if packed.cu_seqlens_kv_padded is None else packed.cu_seqlens_kv_padded
    rows, length = input_ids.shape
    for wrong, what in (
        (packed.qkv_format not in (None, "thd"), f"qkv_format is {packed.qkv_format!r}; documents of a row are 'thd'"),
        (ends is None, "cu_seqlens_q is None; it says where documents end"),
        (rows != 1, f"there are {rows} rows of tokens; documents share one row [1, t]"),
        (group_size(packed.cp_group or cp_group) > 1 or packed.local_cp_size not in (None, 1),
         "with context parallelism Megatron splits each document for itself, which is not built; core.models.GPTModel "
         "takes document_ids of rows that get_batch_on_this_cp_rank has split"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"packed_seq_params: {what}")
    assert ends is not None
    if keys is not None and not torch.equal(keys, ends):
        raise ValueError(
            f"packed_seq_params: cu_seqlens_kv is {keys.tolist()} and cu_seqlens_q {ends.tolist()}; a token sees the "
            "tokens of its own document, so give both the same, or leave cu_seqlens_kv out"
        )
    if int(ends[0]) != 0 or int(ends[-1]) > length or bool((ends.diff() < 0).any()):
        raise ValueError(
            f"packed_seq_params: cu_seqlens_q is {ends.tolist()} for {length} tokens; it goes up from 0 to their number"
        )
    token = torch.arange(length, device=ends.device)
    document = torch.searchsorted(ends[1:].long(), token, right=True)
    return document.unsqueeze(0), (token - ends.long()[document]).unsqueeze(0)

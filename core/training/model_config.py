"""From a job's options to the configurations of the model and of the optimizer."""

from __future__ import annotations

from dataclasses import replace

import torch

from core.distributed import DistributedDataParallelConfig
from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.optimizer import OptimizerConfig
from core.training.config import JobConfig, OptimizerOptions
from core.transformer.transformer_config import TransformerConfig

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def transformer_config(config: JobConfig, vocab_size: int) -> TransformerConfig:
    """The model's own configuration."""
    model, parallel = config.model, config.parallel
    return TransformerConfig(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        sequence_parallel=parallel.uses_sequence_parallel,
        params_dtype=DTYPES[model.dtype],
        bf16=model.dtype == "bfloat16",
        fp16=model.dtype == "float16",
        gradient_accumulation_fusion=model.gradient_accumulation_fusion,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        ffn_hidden_size=model.ffn_width,
        vocab_size=vocab_size,
        max_sequence_length=model.sequence_length,
        normalization=model.normalization,
        activation=model.activation,
        position_embedding_type=model.position_embedding_type,
        qk_layernorm=model.qk_layernorm,
        add_bias_linear=model.add_bias_linear,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        recompute_granularity=model.recompute_granularity,
        recompute_num_layers=model.recompute_num_layers,
        recompute_modules=model.recompute_modules,
        logits_chunk=model.logits_chunk,
        cp_comm_type=parallel.cp_comm_type,
        num_moe_experts=model.num_experts,
        moe_layer_freq=model.moe_layer_freq,
        moe_ffn_hidden_size=model.expert_width,
        moe_router_topk=model.moe_router_topk,
        moe_router_pre_softmax=model.moe_router_pre_softmax,
        moe_router_score_function=model.moe_router_score_function,
        moe_router_enable_expert_bias=model.moe_router_enable_expert_bias,
        moe_router_load_balancing_type=model.moe_router_load_balancing_type,
        moe_aux_loss_coeff=model.moe_aux_loss_coeff,
        moe_z_loss_coeff=model.moe_z_loss_coeff,
        moe_expert_capacity_factor=model.moe_expert_capacity_factor,
        moe_shared_expert_intermediate_size=model.moe_shared_expert_intermediate_size,
        moe_token_dispatcher_type=model.moe_token_dispatcher_type,
        moe_grouped_gemm=model.moe_grouped_gemm,
        init_method_std=model.init_method_std,
        init_seed=config.run.seed,
    )


def optimizer_config(options: OptimizerOptions, dtype: str) -> OptimizerConfig:
    """The optimizer's own configuration, for parameters of a dtype; the scheduler sets the rate of every step."""
    return OptimizerConfig(
        optimizer=options.name,
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        sgd_momentum=options.sgd_momentum,
        clip_grad=options.clip_grad,
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        loss_scale=options.loss_scale,
        initial_loss_scale=options.initial_loss_scale,
        loss_scale_window=options.loss_scale_window,
        params_dtype=DTYPES[dtype],
    )


def ddp_config(config: JobConfig) -> DistributedDataParallelConfig:
    """The wrapper's own configuration. With float16 a gradient that is not finite ends no run: the loss scale falls."""
    if config.model.dtype == "float16" and config.ddp.check_for_nan_in_grad:
        return replace(config.ddp, check_for_nan_in_grad=False, record_nan_in_grad=True)
    return config.ddp


def zero_config(zero: int) -> DistributedDataParallelConfig:
    """The wrapper's configuration of a Hugging Face model; zero: 0 to 3, what is sharded over data ranks."""
    return DistributedDataParallelConfig(
        data_parallel_sharding_strategy=STRATEGIES[zero],
        use_distributed_optimizer=zero > 0,
        overlap_grad_reduce=True,
        overlap_param_gather=zero in (1, 2),
        check_for_nan_in_grad=True,
    )

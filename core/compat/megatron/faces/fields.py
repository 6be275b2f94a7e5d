"""Fields of Megatron Core's configurations (0.16 to 0.20) that nothing here obeys.

A line is what to tell a user, '|', and the fields with their defaults: False where none is said, 'a|b' where versions
differ. A refused field is an error with any other value. One without effect chooses a kernel or a schedule whose result
is the same: any other value is a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from core.compat.arguments import defaults_of
from core.compat.megatron.faces.enums import AttnBackend

TABLE = """
[DistributedDataParallelConfig, refused]
8-bit and 4-bit parameters and products are not built; train in bf16 | fp8_param_gather fp4_param_gather
    reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache
use data_parallel_sharding_strategy and num_distributed_optimizer_instances | outer_dp_sharding_strategy='no_shard'
    use_custom_fsdp
there is one implementation of sharded parameters | megatron_fsdp_version=1
gradients and masters of sharded parameters follow grad_reduce_in_fp32 and OptimizerConfig |
    megatron_fsdp_main_params_dtype='float32' megatron_fsdp_main_grads_dtype=None megatron_fsdp_grad_comm_dtype=None
    megatron_fsdp_use_decoupled_grad preserve_fp32_weights=True
CUDA graphs are not captured here; leave it out | megatron_fsdp_cuda_graph_mode
set grad_reduce_in_fp32=True, which holds for all parameters | param_name_patterns_for_fp32_local_accumulation=()
weight gradients are computed in backward; pipeline schedules with split backward delay them | delay_wgrad_compute
[DistributedDataParallelConfig, without effect]
how memory is registered with NCCL is left to torch | nccl_ub disable_symmetric_registration fsdp_manual_registration
buffers of sharded parameters are pooled in any case | fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail
    megatron_fsdp_max_pool_double_buffer suggested_communication_unit_size=None
    megatron_fsdp_enable_fine_grained_param_gather
gradients are divided where they are reduced | gradient_reduce_div_fusion=True
parameters are gathered around their use | fsdp_all_gather_in_start_param_sync=True
[OptimizerConfig, refused]
8-bit and 4-bit parameters and products are not built; train in bf16 | fp8_recipe=None
    reuse_grad_buf_for_mxfp8_param_ag
SOAP and adaptive Muon are not built; optimizer='muon', or any torch.optim class, is | soap_shampoo_beta=0.95
    soap_precondition_frequency=1 soap_use_kl_shampoo=True adaptive_muon_moment2_method='adamuon'
    adaptive_muon_beta2=0.95 adaptive_muon_eps=1e-08
Muon needs whole matrices: use_distributed_optimizer=True with our keep_params_whole gives each rank some |
    use_layer_wise_distributed_optimizer
CUDA graphs are not captured here; leave it out | optimizer_cuda_graph
configurations are logged by the program | config_logger_dir=''
[OptimizerConfig, without effect]
the step is timed from outside: start a timer before optimizer.step() | timers=None barrier_with_L1_time
state on the CPU is stepped by torch in any case | use_torch_optimizer_for_cpu_offload
the same products are made by torch | muon_use_syrk
[ModelParallelConfig, refused]
one ring of context_parallel_size is what there is | hierarchical_context_parallel_sizes=None hybrid_context_parallel
    max_seqlen_per_dp_cp_rank=None
experts are split by expert_tensor_parallel_size | moe_extended_tp
put torch.autocast around the model in the forward step | enable_autocast autocast_dtype=None
recompute_num_layers is the same for all microbatches | num_microbatches_with_partial_activation_checkpoints=None
TransformerEngine's random streams are not used | use_te_rng_tracker
TransformerEngine's overlap of tensor-parallel products is not built; sequence_parallel overlaps its own |
    tp_comm_overlap
the tokens' exchange is not overlapped with another microbatch | overlap_moe_expert_parallel_comm delay_wgrad_compute
    ep_overlap_early_attn_memory_release overlap_dispatch_backward_with_experts_wgrad
use get_forward_backward_func with our schedule names, whose split backward defers weight gradients |
    defer_embedding_wgrad_compute wgrad_deferral_limit=0
activations are not offloaded; use recompute_granularity, or OptimizerConfig.optimizer_cpu_offload | cpu_offloading
    cpu_offloading_num_layers=0 cpu_offloading_weights cpu_offloading_double_buffering
    cpu_offloading_retain_pinned_cpu_buffers _cpu_offloading_context=None
auxiliary losses are weighed by grad_scale_func | moe_grad_scale_func=None mtp_grad_scale_func=None
set param.pipeline_parallel = True on the embedder's parameters | has_cond_embedder
multi-token prediction is not built | mtp_standalone
weights are not gathered over further groups; use data_parallel_sharding_strategy='optim_grads_params' |
    tensor_parallel_num_weight_shards=None gtp_weight_remat_size=1 expert_tensor_parallel_num_weight_shards=None
    expert_gtp_weight_remat_size=1
stages talk over the backend of the job | pipeline_model_parallel_comm_backend=None
[ModelParallelConfig, without effect]
weights are drawn whole on the CPU in any case, the same ones in every layout | use_cpu_initialization
gradients of inputs are reduced beside the weight's product in any case | async_tensor_model_parallel_allreduce=True
it belongs to tp_comm_overlap | tp_comm_bulk_wgrad=True tp_comm_bulk_dgrad=True tp_comm_overlap_ag=True
    tp_comm_overlap_rs=True tp_comm_overlap_rs_dgrad tp_comm_split_ag=True tp_comm_atomic_ag tp_comm_split_rs=True
    tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend='nccl'
it belongs to cpu_offloading | cpu_offloading_activations=True
the loss is one function of two collectives | cross_entropy_loss_fusion cross_entropy_fusion_impl='native'
torch's pipeline sends and receives in its own way | overlap_p2p_comm batch_p2p_comm=True batch_p2p_sync=True
    use_ring_exchange_p2p deallocate_pipeline_outputs overlap_p2p_comm_warmup_flush
[TransformerConfig, refused]
multi-token prediction is not built | mtp_num_layers=None mtp_loss_scaling_factor=0.1 mtp_use_repeated_layer
    mtp_detach_heads mtp_hybrid_override_pattern=None
cut the layers with num_layers_in_first_pipeline_stage, or by core.pipeline_parallel.PipelineLayout |
    pipeline_model_parallel_layout=None account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
attention is causal, scaled by 1 / sqrt(head size), over all positions before | softmax_scale=None
    softmax_type='vanilla' window_size=None window_attn_skip_freq=None apply_query_key_layer_scaling
    attention_output_gate no_rope_freq=None qk_l2_norm qk_clip qk_clip_alpha=0.5 qk_clip_threshold=100
    log_max_attention_logit
only the pre-norm layer with LayerNorm or RMSNorm is built | fp32_residual_connection
    apply_residual_connection_post_layernorm layernorm_zero_centered_gamma
the MLP is GELU, or SwiGLU | glu_linear_offset=0.0 activation_func_clamp_value=None activation_func_fp8_input_store
    use_te_activation_func use_fused_weighted_squared_relu moe_mlp_glu_interleave_size=None
rotary positions turn the halves of a head's channels | rotary_interleaved mrope_section=None
attention is ordinary; MLA, DSA and linear attention are not built | multi_latent_attention
    experimental_attention_variant=None dsa_indexer_n_heads=None dsa_indexer_head_dim=None dsa_indexer_topk=None
    dsa_indexer_loss_coeff=None dsa_indexer_use_sparse_loss linear_attention_freq=None linear_conv_kernel_dim=4
    linear_key_head_dim=128 linear_value_head_dim=128 linear_num_key_heads=16 linear_num_value_heads=32
    experimental_attention_variant_loss_scale_func=None dsa_indexer_topk_freq=1 dsa_indexer_skip_topk_offset=0
    dsa_kernel_backend='none' dsa_indexer_rope_interleaved dsa_indexer_rotate_activation=True
    dsa_indexer_scoring_relu=True dsa_indexer_k_norm_epsilon=None dsa_indexer_k_norm_fp32
the embedding is drawn with init_method_std | embedding_init_method=None embedding_init_method_std=None
build the model under torch.device('meta') yourself | init_model_with_meta_device
use sequence_parallel, which splits what is saved | distribute_saved_activations
8-bit and 4-bit parameters and products are not built; train in bf16 | fp8=None fp8_recipe='delayed' fp8_param
    fp8_quantizer_factory=None fp8_margin=0 fp8_interval=1 fp8_amax_history_len=1 fp8_amax_compute_algo='most_recent'
    fp8_wgrad=True fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16
    num_layers_at_start_in_bf16=1 num_layers_at_end_in_bf16=1 fp4=None fp4_recipe='nvfp4' fp4_param
    fp4_quantizer_factory=None disable_parameter_transpose_cache quant_recipe=None fp8_output_proj
experts are routed by softmax or sigmoid over all of them, see core.moe | moe_enable_routing_replay
    moe_router_topk_limited_devices=None moe_router_padding_for_quantization moe_router_padding_for_fp8
    moe_router_num_groups=None moe_router_group_topk=None moe_router_force_load_balancing moe_use_legacy_grouped_gemm
    moe_input_jitter_eps=None moe_token_dropping moe_pad_expert_input_to_capacity moe_layer_recompute
    moe_apply_probs_on_input moe_latent_size=None moe_router_quantile_balancing_ema=0.0 moe_router_force_biased=None
    moe_expert_rank_capacity_factor=None moe_shared_expert_glu_interleave_size=None moe_per_layer_logging
CUDA graphs are not captured here; leave it out | enable_cuda_graph cuda_graph_use_single_mempool=False|True
    cuda_graph_retain_backward_graph cuda_graph_warmup_steps=3 external_cuda_graph cuda_graph_impl='none'
    cuda_graph_scope='full'|None cuda_graph_modules='full' moe_paged_stash moe_paged_stash_page_size=64
    moe_paged_stash_buffer_size_factor_cuda=1.1 moe_paged_stash_buffer_size_factor_cpu=0.0
it is for inference; core.generate samples from a trained model | flash_decode inference_rng_tracker
    inference_sampling_seed=42 symmetric_ar_type=None use_inference_optimized_layers inference_fuse_tp_communication
    mlp_chunks_for_prefill=1 inference_cuda_graph_scope=None nccl_all_reduce_for_prefill
    inference_disable_triton_nvls_kernels inference_grouped_gemm_backend='vllm'
    inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type='nvls'
    moe_pad_experts_for_cuda_graph_inference
state-space layers are not here | is_hybrid_model mamba_state_dim=128 mamba_head_dim=64 mamba_num_groups=8
    mamba_num_heads=None use_mamba_mem_eff_path=True mamba_training_ssm_states_dtype=None
every layer has the shape of the config | heterogeneous_block_specs hetereogenous_dist_checkpoint
muP's multipliers are not built; give learning rates by ParamKey overrides | use_mup mup_width_mult=1.0
    mup_base_hidden_size=None mup_embedding_mult=1.0 mup_output_mult=1.0 mup_base_head_dim=None
    mup_attn_scale_power=1.0
activations are not offloaded; use recompute_granularity, or OptimizerConfig.optimizer_cpu_offload |
    fine_grained_activation_offloading offload_modules=[] delay_offload_until_cuda_graph
    delta_offload_bytes_across_pp_ranks=0 activation_offload_fraction=1.0
    fine_grained_offloading_max_inflight_offloads=None
products are torch's, with deterministic_mode in rank order | batch_invariant_mode
    disable_bf16_reduced_precision_matmul
configurations are logged by the program | config_logger_dir=''
Kitchen's kernels are not used | use_kitchen use_kitchen_attention kitchen_attention_backend='sdpa'
[TransformerConfig, without effect]
torch chooses the attention kernel | attention_backend='auto' flash_attention_version=None
    attention_softmax_in_fp32=True masked_softmax_fusion
torch's functions are used; torch.compile fuses them | bias_activation_fusion persist_layer_norm
    memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion fused_single_qkv_rope fused_residual_rmsnorm
    use_transformer_engine_op_fuser moe_permute_fusion moe_router_fusion use_grouped_gemm_for_shared_expert
    use_grouped_gemm_for_dense_mlp moe_single_grouped_weight moe_single_grouped_bias mlp_chunks_for_training=1
tokens travel by the all-to-all of torch | moe_enable_deepep moe_flex_dispatcher_backend='deepep'
    moe_deepep_num_sms=20|None moe_hybridep_num_sms=16|None moe_permute_fusion_into_hybridep
    moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms=None moe_hybridep_num_blocks_permute=None
    moe_hybridep_num_blocks_unpermute=None moe_hybridep_num_sms_preprocessing=108 moe_ncclep_static_shape
    moe_ncclep_zero_copy high_priority_a2a_comm_stream moe_shared_expert_overlap
our layers are used whatever the implementation is called | transformer_impl='transformer_engine'|'local'
nothing is offloaded | min_offloaded_tensor_size=1048576
the embedding's output is a tensor of its own | clone_scatter_output_in_embedding=True
tests of TransformerEngine's layers | test_mode
"""


@dataclass(frozen=True)
class Rule:
    """A field that nothing obeys: its defaults, what to tell a user, and True if another value is an error."""

    defaults: tuple[Any, ...]
    sentence: str
    refused: bool


def rules_of(kind: str) -> dict[str, Rule]:
    """Field -> rule, of one configuration."""
    found: dict[str, Rule] = {}
    section = ""
    for line in TABLE.replace("\n    ", " ").splitlines():
        section = line if line.startswith("[") else section
        sentence, _, words = line.partition(" | ")
        for name, _, text in (word.partition("=") for word in words.split() if section.startswith(f"[{kind},")):
            found[name] = Rule(_defaults(name, text), sentence, section.endswith("refused]"))
    return found


def _defaults(name: str, text: str) -> tuple[Any, ...]:
    if name == "attention_backend":
        return (AttnBackend.auto,)
    values = defaults_of(text or "False")
    return tuple(getattr(torch, value) if name.endswith("_dtype") and value else value for value in values)

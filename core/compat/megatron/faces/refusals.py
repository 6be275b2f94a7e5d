"""Fields of Megatron Core's configurations and arguments of its functions (0.16 to 0.20) that nothing here obeys.

A line is a message to the user, '|', and the fields with their defaults: False where none is said, 'a|b' where versions
differ. A letter is the first one of the configuration that has them: DistributedDataParallel, Optimizer, ModelParallel,
Transformer; A is for arguments, whose defaults the functions say. A refused field is an error with any other value. One
without effect chooses a kernel or a schedule whose result is the same: any other value is a warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from core.compat import arguments as signatures
from core.compat.megatron.faces.enums import AttnBackend

TABLE = """
[refused]
8-bit and 4-bit parameters and products are not built; train in bf16 | D: fp8_param_gather fp4_param_gather
    reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache O: fp8_recipe=None reuse_grad_buf_for_mxfp8_param_ag T:
    fp8=None fp8_recipe='delayed' fp8_param fp8_quantizer_factory=None fp8_margin=0 fp8_interval=1
    fp8_amax_history_len=1 fp8_amax_compute_algo='most_recent' fp8_wgrad=True fp8_dot_product_attention
    fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16=1
    num_layers_at_end_in_bf16=1 fp4=None fp4_recipe='nvfp4' fp4_param fp4_quantizer_factory=None
    disable_parameter_transpose_cache quant_recipe=None fp8_output_proj
use data_parallel_sharding_strategy and num_distributed_optimizer_instances | D: outer_dp_sharding_strategy='no_shard'
    use_custom_fsdp
sharded parameters have one implementation; use_megatron_fsdp=True chooses it | D: megatron_fsdp_version=1
gradients and masters of sharded parameters follow grad_reduce_in_fp32 and OptimizerConfig | D:
    megatron_fsdp_main_params_dtype='float32' megatron_fsdp_main_grads_dtype=None megatron_fsdp_grad_comm_dtype=None
    megatron_fsdp_use_decoupled_grad preserve_fp32_weights=True
CUDA graphs are not captured here; leave it out | D: megatron_fsdp_cuda_graph_mode O: optimizer_cuda_graph T:
    enable_cuda_graph cuda_graph_use_single_mempool=False|True cuda_graph_retain_backward_graph
    cuda_graph_warmup_steps=3 external_cuda_graph cuda_graph_impl='none' cuda_graph_scope='full'|None
    cuda_graph_modules='full' moe_paged_stash moe_paged_stash_page_size=64 moe_paged_stash_buffer_size_factor_cuda=1.1
    moe_paged_stash_buffer_size_factor_cpu=0.0
set grad_reduce_in_fp32=True, which holds for all parameters | D: param_name_patterns_for_fp32_local_accumulation=()
weight gradients are computed in backward; pipeline schedules with split backward delay them | D: delay_wgrad_compute
SOAP and adaptive Muon are not built; optimizer='muon', or any torch.optim class, is | O: soap_shampoo_beta=0.95
    soap_precondition_frequency=1 soap_use_kl_shampoo=True adaptive_muon_moment2_method='adamuon'
    adaptive_muon_beta2=0.95 adaptive_muon_eps=1e-08
Muon needs whole matrices: use_distributed_optimizer=True with our keep_params_whole gives each rank some | O:
    use_layer_wise_distributed_optimizer
write dataclasses.asdict(config) into the program's own log | O: config_logger_dir='' T: config_logger_dir=''
one ring of context_parallel_size is what there is; cp_comm_type says how it talks | M:
    hierarchical_context_parallel_sizes=None hybrid_context_parallel max_seqlen_per_dp_cp_rank=None A: is_hybrid_cp
    hybrid_cp_group_func use_per_sequence_balancing local_cp_size
experts are split by expert_tensor_parallel_size | M: moe_extended_tp
put torch.autocast around the model in the forward step | M: enable_autocast autocast_dtype=None
recompute_num_layers is the same for all microbatches | M: num_microbatches_with_partial_activation_checkpoints=None
model_parallel_cuda_manual_seed seeds the random streams there are; TransformerEngine's are not used | M:
    use_te_rng_tracker
TransformerEngine's overlap of tensor-parallel products is not built; sequence_parallel overlaps its own | M:
    tp_comm_overlap
the tokens' exchange is not overlapped with another microbatch; leave it out, the numbers are the same | M:
    overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
    overlap_dispatch_backward_with_experts_wgrad
use get_forward_backward_func with our schedule names, whose split backward defers weight gradients | M:
    defer_embedding_wgrad_compute wgrad_deferral_limit=0
activations are not offloaded; use recompute_granularity, or OptimizerConfig.optimizer_cpu_offload | M: cpu_offloading
    cpu_offloading_num_layers=0 cpu_offloading_weights cpu_offloading_double_buffering
    cpu_offloading_retain_pinned_cpu_buffers _cpu_offloading_context=None T: fine_grained_activation_offloading
    offload_modules=[] delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks=0
    activation_offload_fraction=1.0 fine_grained_offloading_max_inflight_offloads=None
set grad_scale_func, which weighs auxiliary losses too | M: moe_grad_scale_func=None mtp_grad_scale_func=None
multi-token prediction is not built; train the next token, or write a head of your own over the hidden states | M:
    mtp_standalone T: mtp_num_layers=None mtp_loss_scaling_factor=0.1 mtp_use_repeated_layer mtp_detach_heads
    mtp_hybrid_override_pattern=None A: mtp_block_spec is_mtp_layer
weights are not gathered over further groups; use data_parallel_sharding_strategy='optim_grads_params' | M:
    tensor_parallel_num_weight_shards=None gtp_weight_remat_size=1 expert_tensor_parallel_num_weight_shards=None
    expert_gtp_weight_remat_size=1
stages talk over the job's backend, which torch.distributed.init_process_group is given | M:
    pipeline_model_parallel_comm_backend=None
cut the layers with num_layers_in_first_pipeline_stage, or by core.pipeline_parallel.PipelineLayout | T:
    pipeline_model_parallel_layout=None
attention is causal, scaled by 1 / sqrt(head size), over all positions before; put another one into a model of your own,
    or split a transformers model with core.hugging_face | T: softmax_scale=None softmax_type='vanilla' window_size=None
    window_attn_skip_freq=None apply_query_key_layer_scaling attention_output_gate no_rope_freq=None qk_clip
    qk_clip_alpha=0.5 qk_clip_threshold=100 log_max_attention_logit
qk_layernorm=True is the norm of queries and keys that there is | T: qk_l2_norm
only the pre-norm layer with LayerNorm or RMSNorm is built; put another layer into a model of your own, with the layers
    of tensor_parallel | T: fp32_residual_connection apply_residual_connection_post_layernorm
    layernorm_zero_centered_gamma
the MLP is GELU or SwiGLU: gated_linear_unit=False with activation_func=F.gelu, or True with F.silu | T:
    glu_linear_offset=0.0 activation_func_clamp_value=None activation_func_fp8_input_store use_te_activation_func
    use_fused_weighted_squared_relu moe_mlp_glu_interleave_size=None
rotary positions turn the halves of a head's channels; permute query and key weights that were trained on pairs | T:
    rotary_interleaved mrope_section=None
MLA, DSA and linear attention are not built; split a transformers model that has them with core.hugging_face | T:
    multi_latent_attention experimental_attention_variant=None dsa_indexer_n_heads=None dsa_indexer_head_dim=None
    dsa_indexer_topk=None dsa_indexer_loss_coeff=None dsa_indexer_use_sparse_loss linear_attention_freq=None
    linear_conv_kernel_dim=4 linear_key_head_dim=128 linear_value_head_dim=128 linear_num_key_heads=16
    linear_num_value_heads=32 experimental_attention_variant_loss_scale_func=None dsa_indexer_topk_freq=1
    dsa_indexer_skip_topk_offset=0 dsa_kernel_backend='none' dsa_indexer_rope_interleaved
    dsa_indexer_rotate_activation=True dsa_indexer_scoring_relu=True dsa_indexer_k_norm_epsilon=None
    dsa_indexer_k_norm_fp32
the embedding is drawn with init_method_std | T: embedding_init_method=None embedding_init_method_std=None
the model is built where torch.device says: put `with torch.device('meta'):` around it yourself | T:
    init_model_with_meta_device
use sequence_parallel, which splits what is saved | T: distribute_saved_activations
experts are routed by softmax or sigmoid over all of them, see core.moe | T: moe_enable_routing_replay
    moe_router_topk_limited_devices=None moe_router_padding_for_quantization moe_router_padding_for_fp8
    moe_router_num_groups=None moe_router_group_topk=None moe_router_force_load_balancing
    moe_input_jitter_eps=None moe_token_dropping moe_pad_expert_input_to_capacity
    moe_apply_probs_on_input moe_latent_size=None moe_router_quantile_balancing_ema=0.0 moe_router_force_biased=None
    moe_expert_rank_capacity_factor=None moe_shared_expert_glu_interleave_size=None moe_per_layer_logging
it is for inference; core.generate samples from a trained model | T: flash_decode inference_rng_tracker
    inference_sampling_seed=42 symmetric_ar_type=None use_inference_optimized_layers inference_fuse_tp_communication
    mlp_chunks_for_prefill=1 inference_cuda_graph_scope=None nccl_all_reduce_for_prefill
    inference_disable_triton_nvls_kernels inference_grouped_gemm_backend='vllm'
    inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type='nvls'
    moe_pad_experts_for_cuda_graph_inference
state-space layers are not here; wrap a model of your own in DistributedDataParallel | T: is_hybrid_model
    mamba_state_dim=128 mamba_head_dim=64 mamba_num_groups=8 mamba_num_heads=None use_mamba_mem_eff_path=True
    mamba_training_ssm_states_dtype=None
every layer has the shape of the config; put layers of several shapes into a model of your own | T:
    heterogeneous_block_specs hetereogenous_dist_checkpoint
muP's multipliers are not built; give learning rates by ParamKey overrides | T: use_mup mup_width_mult=1.0
    mup_base_hidden_size=None mup_embedding_mult=1.0 mup_output_mult=1.0 mup_base_head_dim=None mup_attn_scale_power=1.0
set deterministic_mode=True, which sums in rank order; torch makes the products | T: batch_invariant_mode
    disable_bf16_reduced_precision_matmul
torch computes products and attention; Kitchen's kernels are not used | T: use_kitchen use_kitchen_attention
    kitchen_attention_backend='sdpa'
GPTModel(position_embedding_type='rope') turns queries and keys in the attention itself | A: rotary_pos_emb
    rotary_pos_cos rotary_pos_sin rotary_pos_cos_sin
all channels of a head are turned, at positions as they are counted; put another attention into a model of your own, or
    split a transformers model with core.hugging_face | A: rotary_percent rope_scaling rope_scaling_factor
    seq_len_interpolation_factor
cross attention is not built; put a layer of your own into a module of your own, with the layers of tensor_parallel | A:
    context context_mask key_value_states
attention has no bias; packed_seq_params separates documents of a row | A: attention_bias
core.generate samples from a trained model | A: inference_context inference_params sequence_len_offset
leave padded tokens out of the loss, by a loss_mask in the step's loss function | A: padding_mask intermediate_tensors
the loss is computed in fp32; cast what forward returns | A: fp16_lm_cross_entropy logit_dtype output_dtype
the sequence is split where sequence_parallel says so | A: scatter_embedding_sequence_parallel
embeddings come from input_ids; put a model of your own together from TransformerBlock for other inputs | A:
    decoder_input
our layers take no further arguments; put a layer of your own into a module of your own | A: extra_block_kwargs
process what forward returns | A: output_processor output_processor_context
MoELayer builds the experts; ColumnParallelLinear and RowParallelLinear take it for layers of your own | A: is_expert
it is config.hidden_size | A: input_size
multiply what the layer returns | A: per_token_scale
post_process=False leaves the last norm out | A: post_layer_norm
take hidden states with forward hooks on block.layers | A: extract_layer_indices
a norm's weight begins at 1; add 1 to weights that were trained around 0 | A: zero_centered_gamma
moe_grouped_gemm=True groups the experts' products | T: moe_use_legacy_grouped_gemm A: moe_use_legacy_grouped_gemm
recompute_granularity='full' recomputes whole layers, with their experts | T: moe_layer_recompute
core.tensor_parallel.tensor_parallel_join puts the slices together | A: keep_master_weight_for_test
pipeline schedules with split backward put weight gradients off | A: grad_output_buffer embedding_activation_buffer
    wgrad_deferral_limit
linear_with_grad_accumulation_and_async_allreduce(allreduce_dgrad=False) leaves the input's gradient a part of a sum |
    A: disable_grad_reduce
its name is allreduce_dgrad now | A: async_grad_allreduce
data_parallel_sharding_strategy='optim_grads_params' shards weights | A: gtp_remat_size gtp_remat_rank egtp_remat_rank
    gtp_remat_world_size egtp_remat_world_size
one tracker has all random streams, and no CUDA graph is captured | A: use_te_rng_tracker te_rng_tracker
    inference_rng_tracker use_cudagraphable_rng
all ranks hold equally many rows; core.moe.exchange moves unequal numbers | A: output_split_sizes input_split_sizes
torch's allocator uses the memory again | A: use_global_buffer
the exchange is waited for where its rows are read | A: use_nccl_stream
the layout follows from the model; set bucket_size in the DistributedDataParallelConfig | A: full_param_layout
optimizer.param_groups says each group's name and numbers | A: dump_param_to_param_group_map
several modules are not scheduled together; run a schedule for each | A: schedule_pg_collection
stages send hidden states of [seq_length, micro_batch_size, hidden_size] through the group 'pp'; for other shapes use
    core.pipeline_parallel.PipelineRunner(activations=...) | A: adjust_tensor_shapes_fn p2p_communicator
use rampup_batch_size, or reconfigure the calculator at each step | A: step_batch_size_schedule
modules say their place by global_names | A: sharded_offsets
core.checkpoint.CheckpointSaver(asynchronous=True) saves while the program continues | A: async_sharded_save
gathers use the gradients' group | A: create_all_gather_group
gradients lie in .grad | A: use_decoupled_grad
[without effect]
gradients of parameters with param.pipeline_parallel = True are summed over the stages in any case | M:
    has_cond_embedder
how memory is registered with NCCL is left to torch | D: nccl_ub disable_symmetric_registration fsdp_manual_registration
buffers of sharded parameters are pooled in any case | D: fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail
    megatron_fsdp_max_pool_double_buffer suggested_communication_unit_size=None
    megatron_fsdp_enable_fine_grained_param_gather
gradients are divided where they are reduced | D: gradient_reduce_div_fusion=True
parameters are gathered around their use | D: fsdp_all_gather_in_start_param_sync=True
the step is timed from outside: start a timer before optimizer.step() | O: timers=None barrier_with_L1_time
state on the CPU is stepped by torch in any case | O: use_torch_optimizer_for_cpu_offload
the same products are made by torch | O: muon_use_syrk
weights are drawn whole on the CPU in any case, the same ones in every layout | M: use_cpu_initialization
gradients of inputs are reduced during the weight's product in any case | M: async_tensor_model_parallel_allreduce=True
it belongs to tp_comm_overlap | M: tp_comm_bulk_wgrad=True tp_comm_bulk_dgrad=True tp_comm_overlap_ag=True
    tp_comm_overlap_rs=True tp_comm_overlap_rs_dgrad tp_comm_split_ag=True tp_comm_atomic_ag tp_comm_split_rs=True
    tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend='nccl'
it belongs to cpu_offloading | M: cpu_offloading_activations=True
the loss is one function of two collectives | M: cross_entropy_loss_fusion cross_entropy_fusion_impl='native'
torch's pipeline sends and receives in its own way | M: overlap_p2p_comm batch_p2p_comm=True batch_p2p_sync=True
    use_ring_exchange_p2p deallocate_pipeline_outputs overlap_p2p_comm_warmup_flush
torch chooses the attention kernel | T: attention_backend='auto' flash_attention_version=None
    attention_softmax_in_fp32=True masked_softmax_fusion
torch's functions are used; torch.compile fuses them | T: bias_activation_fusion persist_layer_norm
    memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion fused_single_qkv_rope fused_residual_rmsnorm
    use_transformer_engine_op_fuser moe_permute_fusion moe_router_fusion use_grouped_gemm_for_shared_expert
    use_grouped_gemm_for_dense_mlp moe_single_grouped_weight moe_single_grouped_bias mlp_chunks_for_training=1
tokens travel by the all-to-all of torch | T: moe_enable_deepep moe_flex_dispatcher_backend='deepep'
    moe_deepep_num_sms=20|None moe_hybridep_num_sms=16|None moe_permute_fusion_into_hybridep
    moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms=None moe_hybridep_num_blocks_permute=None
    moe_hybridep_num_blocks_unpermute=None moe_hybridep_num_sms_preprocessing=108 moe_ncclep_static_shape
    moe_ncclep_zero_copy high_priority_a2a_comm_stream moe_shared_expert_overlap
our layers are used for any name of the implementation | T: transformer_impl='transformer_engine'|'local'
nothing is offloaded | T: min_offloaded_tensor_size=1048576
the embedding's output is a tensor of its own | T: clone_scatter_output_in_embedding=True
it is read by tests of TransformerEngine's layers alone | T: test_mode
"""


@dataclass(frozen=True)
class Rule:
    """A field that nothing obeys: its defaults, a message to the user, and True if another value is an error."""

    defaults: tuple[Any, ...]
    sentence: str
    refused: bool


def rules_of(kind: str) -> dict[str, Rule]:
    """Field -> rule, of one configuration."""
    found: dict[str, Rule] = {}
    section = of = ""
    for line in TABLE.replace("\n    ", " ").splitlines():
        section = line if line.startswith("[") else section
        sentence, _, words = line.partition(" | ")
        for word in words.split():
            name, _, text = word.partition("=")
            of = name[0] if name.endswith(":") else of
            if of == kind[0] and not name.endswith(":"):
                found[name] = Rule(_defaults(name, text), sentence, section == "[refused]")
    return found


def _defaults(name: str, text: str) -> tuple[Any, ...]:
    if name == "attention_backend":
        return (AttnBackend.auto,)
    values = signatures.defaults_of(text or "False")
    return tuple(getattr(torch, value) if name.endswith("_dtype") and value else value for value in values)


# Decorator: a function by Megatron's signature; what it refuses is refused with the table's sentence.
arguments = functools.partial(
    signatures.arguments, advice={name: rule.sentence for kind in "MTA" for name, rule in rules_of(kind).items()}
)


def refusal(sentence: str) -> Callable[..., None]:
    """A method that is not here: NotImplementedError with the sentence."""

    def refused(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(sentence)

    refused.sentence = sentence  # type: ignore[attr-defined]
    return refused


class Face(type):
    """Of a class with Megatron's constructor: isinstance is true of the class before it too, which the engine makes."""

    def __instancecheck__(cls, instance: Any) -> bool:
        is_own = cls.__module__.startswith(f"{__package__}.")  # and not a program's subclass
        return super().__instancecheck__(instance) or (is_own and isinstance(instance, cls.__mro__[1]))


def never_made(name: str, ours: type, advice: str) -> Any:
    """A class for isinstance and for layer specs. Making one is a NotImplementedError with the advice."""
    refused = refusal(f"{name} cannot be made by Megatron's arguments: {advice}")
    return Face(name, (ours,), {"__init__": refused, "__doc__": advice, "__module__": __name__, "is_never_made": True})

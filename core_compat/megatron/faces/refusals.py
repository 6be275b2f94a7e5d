"""Unsupported fields of Megatron Core's configurations and arguments of its functions (0.16 to 0.20).

A line is a message to the user, '|', and the fields with their defaults: False if no default is given, 'a|b' if
versions differ. A letter is the first letter of the configuration with the fields: DistributedDataParallel, Optimizer,
ModelParallel. A is for arguments, whose defaults are in the functions. Any other value of a rejected field is an error.
A field without effect selects a kernel or a schedule with the same result: any other value is a warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from core_compat import arguments as signatures

TABLE = """
[refused]
8-bit and 4-bit parameters and products are not built; train in bf16 | D: fp8_param_gather fp4_param_gather
    reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache O: fp8_recipe=None reuse_grad_buf_for_mxfp8_param_ag
use data_parallel_sharding_strategy and num_distributed_optimizer_instances | D: outer_dp_sharding_strategy='no_shard'
    use_custom_fsdp
sharded parameters have one implementation; use_megatron_fsdp=True chooses it | D: megatron_fsdp_version=1
gradients and masters of sharded parameters follow grad_reduce_in_fp32 and OptimizerConfig | D:
    megatron_fsdp_main_params_dtype='float32' megatron_fsdp_main_grads_dtype=None megatron_fsdp_grad_comm_dtype=None
    megatron_fsdp_use_decoupled_grad preserve_fp32_weights=True
CUDA graphs are not captured here; leave it out | D: megatron_fsdp_cuda_graph_mode O: optimizer_cuda_graph
set grad_reduce_in_fp32=True, which holds for all parameters | D: param_name_patterns_for_fp32_local_accumulation=()
weight gradients are computed in backward; pipeline schedules with split backward delay them | D: delay_wgrad_compute
SOAP and adaptive Muon are not built; optimizer='muon', or any torch.optim class, is | O: soap_shampoo_beta=0.95
    soap_precondition_frequency=1 soap_use_kl_shampoo=True adaptive_muon_moment2_method='adamuon'
    adaptive_muon_beta2=0.95 adaptive_muon_eps=1e-08
Muon needs whole matrices: use_distributed_optimizer=True with our keep_params_whole gives each rank some | O:
    use_layer_wise_distributed_optimizer
write dataclasses.asdict(config) into the program's own log | O: config_logger_dir=''
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
    cpu_offloading_retain_pinned_cpu_buffers _cpu_offloading_context=None
set grad_scale_func, which weighs auxiliary losses too | M: moe_grad_scale_func=None mtp_grad_scale_func=None
multi-token prediction is not built; train the next token, or write a head of your own over the hidden states | M:
    mtp_standalone
weights are not gathered over further groups; use data_parallel_sharding_strategy='optim_grads_params' | M:
    tensor_parallel_num_weight_shards=None gtp_weight_remat_size=1 expert_tensor_parallel_num_weight_shards=None
    expert_gtp_weight_remat_size=1
stages talk over the job's backend, which torch.distributed.init_process_group is given | M:
    pipeline_model_parallel_comm_backend=None
data_parallel_sharding_strategy='optim_grads_params' shards weights | A: gtp_remat_rank egtp_remat_rank
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
experts are built from layers of Megatron's own megatron.core, or by core.moe | A: is_expert
a weight is cut from its master when the layer is made, and the master is not kept | A: keep_master_weight_for_test
weight gradients are computed in backward | A: embedding_activation_buffer grad_output_buffer
    wgrad_deferral_limit=0
the gradient of the layer's input is summed over the tensor-parallel ranks, or it would be wrong | A:
    disable_grad_reduce
it is an old name of allreduce_dgrad; give that | A: async_grad_allreduce
cast the output | A: output_dtype
weights are not gathered over further groups | A: gtp_remat_size
[without effect]
gradients of parameters with param.pipeline_parallel = True are summed over the stages in any case | M:
    has_cond_embedder
all-gathers are complete when the optimizer's step returns, on all stages | D: align_param_gather
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
"""


@dataclass(frozen=True)
class Rule:
    """Rule for an unsupported field: its defaults, a message to the user, and True if another value is an error."""

    defaults: tuple[Any, ...]
    sentence: str
    refused: bool


def rules_of(kind: str) -> dict[str, Rule]:
    """Return the rule of each field of one configuration."""
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
    values = signatures.defaults_of(text or "False")
    return tuple(getattr(torch, value) if name.endswith("_dtype") and value else value for value in values)


# Decorator for a function with Megatron's signature; errors for rejected arguments have the table's text.
arguments = functools.partial(
    signatures.arguments, advice={name: rule.sentence for kind in "MA" for name, rule in rules_of(kind).items()}
)


def refusal(sentence: str) -> Callable[..., None]:
    """Create a method that raises NotImplementedError with the given text."""

    def refused(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(sentence)

    refused.sentence = sentence  # type: ignore[attr-defined]
    return refused


class StandsFor(type):
    """Metaclass of classes with Megatron's names.

    Instances of the core class in ``stands_for`` are instances of them.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, vars(cls).get("stands_for", ()))


def never_made(name: str, ours: type, advice: str) -> Any:
    """Create a class for isinstance that raises NotImplementedError with the advice when it is instantiated."""
    refused = refusal(f"{name} cannot be made by Megatron's arguments: {advice}")
    space = {"stands_for": ours, "__init__": refused, "__doc__": advice, "__module__": __name__, "is_never_made": True}
    return StandsFor(name, (ours,), space)

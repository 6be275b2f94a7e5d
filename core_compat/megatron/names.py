"""Places of Megatron Core's names in this package, in the format of core_compat.install.read_rows, and module aliases.

A word that begins with '.' is a module below ``faces``.
"""

from __future__ import annotations

from core_compat.install import read_rows

MODULES = read_rows(
    """
- .optimizer DistributedDataParallel .configs ModelParallelConfig .timers Timers .tools is_torch_min_version
parallel_state .groups initialize_model_parallel is_unitialized get_data_parallel_group
    get_data_parallel_world_size get_data_parallel_rank get_expert_data_parallel_group
    get_expert_data_parallel_world_size get_expert_data_parallel_rank .hyper_comm_grid RankGenerator
    core.parallel_state * get_nccl_options default_embedding_ranks default_position_embedding_ranks
process_groups_config core.parallel_state ProcessGroupCollection
hyper_comm_grid .hyper_comm_grid HyperCommGrid
model_parallel_config .configs ModelParallelConfig

distributed @distributed.distributed_data_parallel @distributed.distributed_data_parallel_config
    @distributed.finalize_model_grads
distributed.distributed_data_parallel .optimizer DistributedDataParallel
distributed.distributed_data_parallel_config .configs DistributedDataParallelConfig
distributed.finalize_model_grads core.distributed finalize_model_grads
distributed.param_and_grad_buffer .buffers ParamAndGradBuffer _ParamAndGradBuffer=ParamAndGradBuffer
    Bucket=ParamAndGradBucket _ParamAndGradBucket=ParamAndGradBucket _ParamAndGradBucketGroup=ParamAndGradBucketGroup
    BufferType shard_buffer partition_buckets
optimizer .optimizer get_megatron_optimizer core.optimizer get_standard_config_overrides
    @optimizer.optimizer @optimizer.optimizer_config @optimizer.distrib_optimizer
optimizer.optimizer .optimizer MegatronOptimizer core.optimizer ChainedOptimizer FP32Optimizer=ReplicatedOptimizer
    MixedPrecisionOptimizer=ReplicatedOptimizer Float16OptimizerWithFloat16Params=ReplicatedOptimizer
optimizer.optimizer_config .configs OptimizerConfig AdamOptimizerConfig=OptimizerConfig SGDOptimizerConfig
    core.optimizer ParamKey ParamPredicate ParamWithNamePredicate ParamGroupOverride
optimizer.distrib_optimizer .optimizer DistributedOptimizer
optimizer.clip_grads .clip_grads get_grad_norm_fp32 clip_grad_by_total_norm_fp32 count_zeros_fp32
optimizer.grad_scaler core.optimizer.loss_scaler MegatronGradScaler=LossScaler ConstantGradScaler=ConstantLossScaler
    DynamicGradScaler=DynamicLossScaler
optimizer_param_scheduler core.optimizer OptimizerParamScheduler get_canonical_lr_for_logging ParamGroupOverride

tensor_parallel @tensor_parallel.layers @tensor_parallel.mappings @tensor_parallel.random @tensor_parallel.data
    @tensor_parallel.cross_entropy @tensor_parallel.utils
tensor_parallel.layers .layers ColumnParallelLinear RowParallelLinear
    linear_with_grad_accumulation_and_async_allreduce
    core.tensor_parallel VocabParallelEmbedding set_tensor_model_parallel_attributes
    .mappings copy_tensor_model_parallel_attributes set_defaults_if_not_set_tensor_model_parallel_attributes
    param_is_not_tensor_parallel_duplicate
tensor_parallel.mappings .mappings gather_from_sequence_parallel_region reduce_scatter_to_sequence_parallel_region
    all_to_all all_gather_last_dim_from_tensor_parallel_region reduce_scatter_last_dim_to_tensor_parallel_region
    core.tensor_parallel copy_to_tensor_model_parallel_region reduce_from_tensor_model_parallel_region
    scatter_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region
    scatter_to_sequence_parallel_region
tensor_parallel.random .mappings model_parallel_cuda_manual_seed get_cuda_rng_tracker initialize_rng_tracker
    get_all_rng_states get_expert_parallel_rng_tracker_name get_data_parallel_rng_tracker_name
    core.tensor_parallel checkpoint CudaRNGStatesTracker
tensor_parallel.cross_entropy .mappings vocab_parallel_cross_entropy
tensor_parallel.data core.tensor_parallel broadcast_data
tensor_parallel.utils .mappings split_tensor_along_last_dim split_tensor_into_1d_equal_chunks gather_split_1d_tensor
    VocabUtility .tools divide ensure_divisibility

pipeline_parallel @pipeline_parallel.schedules
pipeline_parallel.schedules .schedules get_forward_backward_func forward_backward_no_pipelining=forward_backward
    forward_backward_pipelining_with_interleaving=forward_backward
    forward_backward_pipelining_without_interleaving=forward_backward
pipeline_parallel.utils .groups is_pp_first_stage is_pp_last_stage is_vp_first_stage is_vp_last_stage
    get_pp_first_rank get_pp_last_rank get_pp_next_rank get_pp_prev_rank

transformer.module .modules Float16Module param_is_not_shared
transformer.moe.moe_utils core.moe MoEAuxLossAutoScaler .tools get_default_pg_collection

dist_checkpointing @dist_checkpointing.serialization @dist_checkpointing.core
    core_compat.megatron.tree ShardedTensor ShardedObject LocalNonpersistentObject
dist_checkpointing.mapping core_compat.megatron.tree ShardedTensor ShardedObject ShardedTensorFactory
    LocalNonpersistentObject StateDict CommonStateDict=StateDict ShardedStateDict=StateDict ReplicaId is_main_replica
    apply_factories
dist_checkpointing.serialization .checkpoint save load load_common_state_dict load_tensors_metadata
    load_sharded_metadata=load_tensors_metadata load_plain_tensors load_content_metadata
    get_default_save_sharded_strategy=Strategy get_default_load_sharded_strategy=Strategy
dist_checkpointing.strategies.fully_parallel .checkpoint FullyParallelSaveStrategyWrapper=Strategy
    FullyParallelLoadStrategyWrapper=Strategy
dist_checkpointing.strategies.torch .checkpoint TorchDistSaveShardedStrategy=Strategy
    TorchDistLoadShardedStrategy=Strategy
dist_checkpointing.validation .checkpoint StrictHandling parse_strict_flag=StrictHandling
dist_checkpointing.core core.checkpoint CheckpointingException=CheckpointError
    core_compat.megatron.tree_files check_is_distributed_checkpoint=is_tree
dist_checkpointing.utils core_compat.megatron.tree add_prefix_for_sharding replace_prefix_for_sharding
    apply_prefix_mapping
dist_checkpointing.dict_utils core_compat.megatron.tree merge nested_values=leaves_of

timers .timers Timers Timer
num_microbatches_calculator .schedules init_num_microbatches_calculator reconfigure_num_microbatches_calculator
    destroy_num_microbatches_calculator update_num_microbatches get_num_microbatches get_micro_batch_size
    get_current_global_batch_size get_current_running_global_batch_size
    .microbatches NumMicroBatchesCalculator=MicrobatchCalculator
utils .tools * divide ensure_divisibility init_method_normal get_torch_version get_default_pg_collection
    .groups get_pg_size get_pg_rank get_pg_src_rank core.groups.memory_buffer GlobalMemoryBuffer
    .modules get_attr_wrapped_model get_model_config get_model_type get_model_xattn unwrap_model
""",
    ".faces",
)
ALIASES = {"mpu": "parallel_state"}
_FSDP = (
    "use DistributedDataParallel with use_megatron_fsdp=True and data_parallel_sharding_strategy='optim_grads_params'"
)
_GENERATE = "python -m core generate samples from a trained GPT; serve with an inference engine"

# Megatron's own package builds a model; here the tags of its layers are read.
_MODEL = (
    "build the model with Megatron's own megatron.core, whose parallel_state is initialized too, and wrap it in the "
    "DistributedDataParallel that is here; or build core.models.gpt.GPTModel. The page Coming from Megatron Core has "
    "both programs"
)
_CONFIG = f"a model's configuration is Megatron's own, or core.transformer.TransformerConfig: {_MODEL}"

# A name or its package -> advice.
ABSENT = {
    **dict.fromkeys(("models", "transformer", "fusions"), _MODEL),
    **dict.fromkeys(("transformer.transformer_config", "transformer.TransformerConfig"), _CONFIG),
    "enums": "nothing here reads a model's type; leave it out, or import Megatron's own for its model",
    "packed_seq_params": "import Megatron's own for its model; core.models.gpt.GPTModel takes document_ids and "
    "position_ids, which core.context_parallel.documents_from_ends makes",
    "datasets": "write an iterator of dictionaries of tensors; core_train.tokens reads .bin/.idx files",
    "tokenizers": "use a tokenizer of its own package (tokenizers, transformers); core_train reads token files",
    "inference": _GENERATE,
    "inference_params": _GENERATE,
    "export": "convert checkpoints with python -m core convert, and export from there",
    "extensions": "import Megatron's own, for its models",
    "ssm": "import Megatron's own, for its models",
    "post_training": "quantisation after training is not here",
    "distributed.fsdp": _FSDP,
    "distributed.FullyShardedDataParallel": _FSDP,
    "distributed.TorchFullyShardedDataParallel": "core.booster.plugin.TorchFSDPPlugin wraps torch's FSDP2",
    "dist_checkpointing.strategies": "checkpoints have one format here; save and load without this strategy",
    "dist_checkpointing.optimizer": "optimizer.sharded_state_dict() stands for an optimizer's state",
    "pipeline_parallel.p2p_communication": "torch's pipeline sends; core.pipeline_parallel.PipelineRunner drives it",
    "rerun_state_machine": "ddp_config.check_for_nan_in_grad and check_replicas name a wrong gradient",
    "resharding": "checkpoints load at any layout; save and load",
}

# Packages that a program keeps importing from Megatron, for its model.
OWN = frozenset(("models", "transformer", "fusions", "enums", "packed_seq_params", "extensions", "ssm"))

_LOOP = "write the loop as examples/my_loop.py does, or train a GPT by python pretrain_gpt.py"
_OPTIONS = "read options with argparse; python pretrain_gpt.py --help lists those of the job here"
_START = "call torch.distributed.init_process_group and parallel_state.initialize_model_parallel"
_BUILD = "build the model, wrap it in DistributedDataParallel, and call get_megatron_optimizer"
_FILES = "use dist_checkpointing.save and load, or core.checkpoint.save_checkpoint and load_checkpoint"

# Names next to megatron.core in Megatron-LM -> advice.
OUTSIDE = {
    "training": f"it is the trainer of Megatron-LM; {_LOOP}",
    **dict.fromkeys(("training.get_args", "training.arguments", "training.global_vars"), _OPTIONS),
    **dict.fromkeys(("training.initialize", "training.initialize_megatron"), _START),
    **dict.fromkeys(("training.get_model", "training.setup_model_and_optimizer"), _BUILD),
    **dict.fromkeys(("training.training.get_model", "training.training.setup_model_and_optimizer"), _BUILD),
    "training.checkpointing": _FILES,
    "training.get_timers": "make a core_compat.megatron.faces.timers.Timers(log_level, log_option)",
    "training.print_rank_0": "print where torch.distributed.get_rank() is 0",
    "training.utils.print_rank_0": "print where torch.distributed.get_rank() is 0",
    "training.get_tokenizer": "use a tokenizer of its own package (tokenizers, transformers)",
    "training.tokenizer": "use a tokenizer of its own package (tokenizers, transformers)",
    "legacy": "megatron.core has taken its place",
    "energon": "write an iterator of dictionaries of tensors",
}

"""Where Megatron Core's names are here. The rows are read by core.compat.install.Surface, which says what they mean."""

from __future__ import annotations

GROUPS = ".faces.groups"
LAYERS = ".faces.layers"
MODULES_FACE = ".faces.modules"
GPT = ".faces.gpt"
CHECKPOINT = ".faces.checkpoint"
SHARDED = ".faces.sharded"
OURS = "core.tensor_parallel"

SPLIT = {
    LAYERS: "ColumnParallelLinear RowParallelLinear linear_with_grad_accumulation_and_async_allreduce "
    "copy_tensor_model_parallel_attributes set_defaults_if_not_set_tensor_model_parallel_attributes "
    "param_is_not_tensor_parallel_duplicate",
    OURS: "VocabParallelEmbedding set_tensor_model_parallel_attributes",
}
MAPPINGS = {
    LAYERS: "gather_from_sequence_parallel_region reduce_scatter_to_sequence_parallel_region all_to_all "
    "all_gather_last_dim_from_tensor_parallel_region reduce_scatter_last_dim_to_tensor_parallel_region",
    OURS: "copy_to_tensor_model_parallel_region reduce_from_tensor_model_parallel_region "
    "scatter_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region "
    "scatter_to_sequence_parallel_region",
}
RANDOM = {
    LAYERS: "model_parallel_cuda_manual_seed get_cuda_rng_tracker initialize_rng_tracker get_all_rng_states "
    "get_expert_parallel_rng_tracker_name get_data_parallel_rng_tracker_name",
    OURS: "checkpoint CudaRNGStatesTracker",
}
PIECES = {LAYERS: "split_tensor_along_last_dim split_tensor_into_1d_equal_chunks gather_split_1d_tensor"}
STAGES = (
    "is_pp_first_stage is_pp_last_stage is_vp_first_stage is_vp_last_stage get_pp_first_rank get_pp_last_rank "
    "get_pp_next_rank get_pp_prev_rank"
)
KEYS = {"core.optimizer": "ParamKey ParamPredicate ParamWithNamePredicate ParamGroupOverride"}
OPTIMIZERS = {
    "core.optimizer": "MegatronOptimizer ChainedOptimizer MixedPrecisionOptimizer=ReplicatedOptimizer "
    "Float16OptimizerWithFloat16Params=ReplicatedOptimizer FP32Optimizer=ReplicatedOptimizer"
}
OPTIMIZER_CONFIGS = {".faces.configs": "OptimizerConfig AdamOptimizerConfig SGDOptimizerConfig"}
SCHEDULES = {
    ".faces.schedules": "get_forward_backward_func forward_backward_no_pipelining=forward_backward "
    "forward_backward_pipelining_with_interleaving=forward_backward "
    "forward_backward_pipelining_without_interleaving=forward_backward"
}
SPECS = (
    "get_gpt_layer_local_spec get_gpt_layer_with_transformer_engine_spec get_gpt_decoder_block_spec "
    "get_gpt_decoder_layer_specs=get_gpt_decoder_block_spec"
)
MAPPING = (
    "ShardedTensor ShardedObject ShardedTensorFactory LocalNonpersistentObject StateDict "
    "CommonStateDict=StateDict ShardedStateDict=StateDict ReplicaId is_main_replica apply_factories"
)
SERIALIZATION = (
    "save load load_common_state_dict load_tensors_metadata load_sharded_metadata=load_tensors_metadata "
    "load_plain_tensors load_content_metadata"
)
DATA_GROUPS = (
    "initialize_model_parallel is_unitialized RankGenerator get_data_parallel_group get_data_parallel_world_size "
    "get_data_parallel_rank"
)
DEFAULT_STRATEGIES = "get_default_save_sharded_strategy get_default_load_sharded_strategy"
MICROBATCHES = {".faces.microbatches": "*"}


def _joined(*rows: dict[str, str]) -> dict[str, str]:
    """One row with the words of several."""
    return {source: " ".join(row[source] for row in rows if source in row) for row in rows for source in row}


MODULES: dict[str, dict[str, str]] = {
    "": {
        ".faces.wrapper": "DistributedDataParallel",
        ".faces.configs": "ModelParallelConfig",
        ".faces.timers": "Timers",
        ".faces.tools": "is_torch_min_version",
    },
    # -- groups
    "parallel_state": {GROUPS: DATA_GROUPS, "core.parallel_state": "*"},
    "process_groups_config": {"core.process_groups": "ProcessGroupCollection"},
    "hyper_comm_grid": {GROUPS: "HyperCommGrid"},
    # -- configurations
    "model_parallel_config": {".faces.configs": "ModelParallelConfig"},
    "transformer.transformer_config": {".faces.configs": "TransformerConfig"},
    # -- gradients
    "distributed": {
        ".faces.wrapper": "DistributedDataParallel",
        ".faces.configs": "DistributedDataParallelConfig",
        "core.distributed": "finalize_model_grads",
    },
    "distributed.distributed_data_parallel": {".faces.wrapper": "DistributedDataParallel"},
    "distributed.distributed_data_parallel_config": {".faces.configs": "DistributedDataParallelConfig"},
    "distributed.finalize_model_grads": {"core.distributed": "finalize_model_grads"},
    # -- optimizers
    "optimizer": {
        ".faces.optimizer": "get_megatron_optimizer DistributedOptimizer",
        **OPTIMIZER_CONFIGS,
        **_joined(OPTIMIZERS, KEYS, {"core.optimizer": "get_standard_config_overrides"}),
    },
    "optimizer.optimizer": OPTIMIZERS,
    "optimizer.optimizer_config": {**OPTIMIZER_CONFIGS, **KEYS},
    "optimizer.distrib_optimizer": {".faces.optimizer": "DistributedOptimizer"},
    "optimizer.grad_scaler": {
        "core.optimizer.loss_scaler": "MegatronGradScaler=LossScaler ConstantGradScaler=ConstantLossScaler "
        "DynamicGradScaler=DynamicLossScaler"
    },
    "optimizer_param_scheduler": {
        "core.optimizer": "OptimizerParamScheduler get_canonical_lr_for_logging ParamGroupOverride"
    },
    # -- split layers
    "tensor_parallel": _joined(
        SPLIT,
        MAPPINGS,
        RANDOM,
        PIECES,
        {LAYERS: "vocab_parallel_cross_entropy broadcast_data"},
    ),
    "tensor_parallel.layers": SPLIT,
    "tensor_parallel.mappings": MAPPINGS,
    "tensor_parallel.random": RANDOM,
    "tensor_parallel.cross_entropy": {LAYERS: "vocab_parallel_cross_entropy"},
    "tensor_parallel.data": {LAYERS: "broadcast_data"},
    "tensor_parallel.utils": _joined(PIECES, {LAYERS: "VocabUtility"}),
    # -- pipelines
    "pipeline_parallel": SCHEDULES,
    "pipeline_parallel.schedules": SCHEDULES,
    "pipeline_parallel.utils": {GROUPS: STAGES},
    # -- models
    "models.gpt": {GPT: "GPTModel"},
    "models.gpt.gpt_model": {GPT: "GPTModel"},
    "models.gpt.gpt_layer_specs": {GPT: SPECS},
    "models.common.language_module.language_module": {MODULES_FACE: "LanguageModule=MegatronModule"},
    "transformer": {".faces.configs": "TransformerConfig", MODULES_FACE: "MegatronModule ModuleSpec build_module"},
    "transformer.module": {MODULES_FACE: "MegatronModule Float16Module param_is_not_shared"},
    "transformer.spec_utils": {MODULES_FACE: "ModuleSpec build_module get_module import_module"},
    "transformer.identity_op": {MODULES_FACE: "IdentityOp IdentityFuncOp"},
    "transformer.enums": {".faces.enums": "ModelType LayerType AttnType AttnMaskType AttnBackend"},
    "transformer.transformer_layer": {
        GPT: "get_transformer_layer_offset",
        "core.transformer.transformer_layer": "TransformerLayer",
    },
    "transformer.transformer_block": {
        GPT: "get_num_layers_to_build",
        "core.transformer.transformer_block": "TransformerBlock",
    },
    "transformer.attention": {"core.transformer.attention": "SelfAttention"},
    "transformer.mlp": {"core.transformer.mlp": "MLP"},
    "transformer.moe.moe_layer": {"core.moe": "MoELayer"},
    "transformer.moe.router": {"core.moe": "TopKRouter Router=TopKRouter"},
    "transformer.moe.experts": {"core.moe": "SequentialMLP=Experts GroupedMLP=Experts TEGroupedMLP=Experts"},
    "transformer.moe.shared_experts": {"core.moe": "SharedExpertMLP=SharedExpert"},
    "transformer.moe.token_dispatcher": {
        "core.moe": "MoEAllGatherTokenDispatcher=AllGatherTokenDispatcher MoEAlltoAllTokenDispatcher="
        "AllToAllTokenDispatcher"
    },
    "transformer.moe.moe_utils": {"core.moe": "MoEAuxLossAutoScaler", ".faces.tools": "get_default_pg_collection"},
    # -- checkpoints
    "dist_checkpointing": {
        CHECKPOINT: f"{SERIALIZATION} check_is_distributed_checkpoint",
        SHARDED: "ShardedTensor ShardedObject LocalNonpersistentObject",
    },
    "dist_checkpointing.mapping": {SHARDED: MAPPING},
    "dist_checkpointing.serialization": {CHECKPOINT: SERIALIZATION, SHARDED: DEFAULT_STRATEGIES},
    "dist_checkpointing.strategies.fully_parallel": {
        SHARDED: "FullyParallelSaveStrategyWrapper=Strategy FullyParallelLoadStrategyWrapper=Strategy"
    },
    "dist_checkpointing.strategies.torch": {
        SHARDED: "TorchDistSaveShardedStrategy=Strategy TorchDistLoadShardedStrategy=Strategy"
    },
    "dist_checkpointing.validation": {SHARDED: "StrictHandling parse_strict_flag"},
    "dist_checkpointing.core": {CHECKPOINT: "CheckpointingException=CheckpointError check_is_distributed_checkpoint"},
    "dist_checkpointing.utils": {SHARDED: "add_prefix_for_sharding replace_prefix_for_sharding apply_prefix_mapping"},
    "dist_checkpointing.dict_utils": {SHARDED: "merge nested_values"},
    # -- the rest
    "enums": {".faces.enums": "ModelType Fp8Recipe"},
    "timers": {".faces.timers": "Timers Timer"},
    "packed_seq_params": {GPT: "PackedSeqParams"},
    "num_microbatches_calculator": MICROBATCHES,
    "utils": {
        ".faces.tools": "*",
        GROUPS: "get_pg_size get_pg_rank get_pg_src_rank",
        MODULES_FACE: "get_attr_wrapped_model get_model_config get_model_type get_model_xattn unwrap_model",
        "core.memory_buffer": "GlobalMemoryBuffer",
    },
}

ALIASES = {"mpu": "parallel_state"}

# A name, or the package that it is in -> what to do instead.
ABSENT = {
    "datasets": "read tokens with core.training.token_file, or write an iterator of dictionaries of tensors",
    "tokenizers": "use a tokenizer of its own package (tokenizers, transformers); core.training reads token files",
    "inference": "core.generate samples from a trained GPT; serve with an inference engine",
    "inference_params": "core.generate samples from a trained GPT",
    "export": "convert checkpoints with python -m core.convert, and export from there",
    "extensions": "TransformerEngine's layers are not wrapped; the layers of core.compat.megatron.tensor_parallel and "
    "get_gpt_layer_local_spec() take their place",
    "fusions": "the unfused functions of torch give the same numbers; torch.compile fuses them",
    "ssm": "state-space layers are not here; a model of your own can be wrapped in DistributedDataParallel",
    "post_training": "quantisation after training is not here",
    "models.multimodal": "the text model is models.gpt; combine it with an encoder of your own",
    "models.vision": "use a torch or transformers model, wrapped in DistributedDataParallel",
    "models.T5": "models with an encoder and a decoder are not here; use core.hugging_face to split one",
    "models.bert": "use core.hugging_face to split a transformers model",
    "models.gpt.gpt_layer_specs.get_gpt_mtp_block_spec": "multi-token prediction is not built",
    "transformer.transformer_config.MLATransformerConfig": "multi-latent attention is not built; core.hugging_face "
    "splits a transformers model that has it",
    "transformer.moe.router_replay": "routing is not replayed; the router's choices are what its forward returns",
    "distributed.fsdp": "use DistributedDataParallelConfig(use_megatron_fsdp=True, "
    "data_parallel_sharding_strategy='optim_grads_params')",
    "distributed.FullyShardedDataParallel": "use DistributedDataParallel with use_megatron_fsdp=True and "
    "data_parallel_sharding_strategy='optim_grads_params' in its config",
    "distributed.TorchFullyShardedDataParallel": "core.booster.plugin.TorchFSDPPlugin wraps torch's FSDP2",
    "distributed.param_and_grad_buffer": "model.grad_buffers are the buffers, model.describe() prints them",
    "dist_checkpointing.strategies": "checkpoints have one format here; save and load without this strategy",
    "dist_checkpointing.optimizer": "optimizer.sharded_state_dict() stands for an optimizer's state",
    "pipeline_parallel.p2p_communication": "torch's pipeline sends; core.pipeline_parallel.PipelineRunner drives it",
    "rerun_state_machine": "ddp_config.check_for_nan_in_grad and check_replicas name a wrong gradient",
    "resharding": "checkpoints load at any layout; save and load",
}

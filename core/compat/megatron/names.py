"""Where Megatron Core's names are here. The rows are read by core.compat.install.Surface, which says what they mean."""

from __future__ import annotations

GROUPS = {"core.parallel_state": "*"}
DDP_CONFIG = "DistributedDataParallelConfig"
PARAM_KEYS = "ParamKey ParamPredicate ParamWithNamePredicate"
LAYERS = (
    "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding linear_with_grad_accumulation_and_async_allreduce "
    "set_tensor_model_parallel_attributes"
)
MAPPINGS = (
    "copy_to_tensor_model_parallel_region reduce_from_tensor_model_parallel_region "
    "scatter_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region "
    "scatter_to_sequence_parallel_region gather_from_sequence_parallel_region "
    "reduce_scatter_to_sequence_parallel_region"
)
RANDOM = "checkpoint get_cuda_rng_tracker model_parallel_cuda_manual_seed"

MODULES: dict[str, dict[str, str]] = {
    "parallel_state": GROUPS,
    "process_groups_config": {"core.process_groups": "ProcessGroupCollection"},
    # -- gradients
    "distributed": {"core.distributed": f"DistributedDataParallel {DDP_CONFIG} finalize_model_grads"},
    "distributed.distributed_data_parallel": {"core.distributed": "DistributedDataParallel"},
    "distributed.distributed_data_parallel_config": {"core.distributed": DDP_CONFIG},
    "distributed.finalize_model_grads": {"core.distributed": "finalize_model_grads"},
    # -- optimizers
    "optimizer_param_scheduler": {"core.optimizer": "OptimizerParamScheduler get_canonical_lr_for_logging"},
    "optimizer.distrib_optimizer": {"core.optimizer": "DistributedOptimizer"},
    # -- split layers
    "tensor_parallel": {"core.tensor_parallel": f"{LAYERS} {MAPPINGS} {RANDOM} vocab_parallel_cross_entropy"},
    "tensor_parallel.layers": {"core.tensor_parallel": LAYERS},
    "tensor_parallel.mappings": {"core.tensor_parallel": MAPPINGS},
    "tensor_parallel.random": {"core.tensor_parallel": f"{RANDOM} CudaRNGStatesTracker"},
    "tensor_parallel.cross_entropy": {"core.tensor_parallel": "vocab_parallel_cross_entropy"},
}

ALIASES = {"mpu": "parallel_state"}

# A name, or the package that it is in -> what to do instead.
ABSENT = {
    "datasets": "read tokens with core.training.token_file, or write an iterator of dictionaries of tensors",
    "tokenizers": "use a tokenizer of its own package (tokenizers, transformers); core.training reads token files",
    "inference": "core.generate samples from a trained GPT; serve with an inference engine",
    "export": "convert checkpoints with python -m core.convert, and export from there",
    "extensions": "TransformerEngine's layers are not wrapped; the layers of core.compat.megatron.tensor_parallel and "
    "get_gpt_layer_local_spec() take their place",
    "fusions": "the unfused functions of torch give the same numbers; torch.compile fuses them",
    "ssm": "state-space layers are not here; a model of its own can be wrapped in DistributedDataParallel",
    "post_training": "quantisation after training is not here",
    "models.multimodal": "the text model is models.gpt; combine it with an encoder of your own",
    "models.vision": "use a torch or transformers model, wrapped in DistributedDataParallel",
    "models.T5": "models with an encoder and a decoder are not here; use core.hugging_face to split one",
    "models.bert": "use core.hugging_face to split a transformers model",
    "distributed.fsdp": "use DistributedDataParallelConfig(data_parallel_sharding_strategy='optim_grads_params')",
    "distributed.FullyShardedDataParallel": "use DistributedDataParallel with "
    "DistributedDataParallelConfig(data_parallel_sharding_strategy='optim_grads_params')",
}

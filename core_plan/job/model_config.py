"""From a job's options to the configurations of the model and of the optimizer."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from core.distributed import DistributedDataParallelConfig
from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.optimizer import OptimizerConfig
from core.transformer.transformer_config import TransformerConfig
from core_plan.job.config import JobConfig, OptimizerOptions

Config = TypeVar("Config", bound=TransformerConfig | OptimizerConfig)
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def of_equal_names(kind: type[Config], options: Any, **others: Any) -> Config:
    """A configuration with the options that are called as its fields are, and with ``others``, which win."""
    names = {field.name for field in fields(options)} & {field.name for field in fields(kind)}
    return kind(**{name: getattr(options, name) for name in names} | others)


def transformer_config(config: JobConfig, vocab_size: int) -> TransformerConfig:
    """The model's own configuration."""
    model, parallel = config.model, config.parallel
    return of_equal_names(
        TransformerConfig,
        model,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        sequence_parallel=parallel.uses_sequence_parallel,
        params_dtype=DTYPES[model.dtype],
        bf16=model.dtype == "bfloat16",
        fp16=model.dtype == "float16",
        ffn_hidden_size=model.ffn_width,
        vocab_size=vocab_size,
        max_sequence_length=model.sequence_length,
        cp_comm_type=parallel.cp_comm_type,
        num_moe_experts=model.num_experts,
        moe_ffn_hidden_size=model.expert_width,
        init_seed=config.run.seed,
    )


def optimizer_config(options: OptimizerOptions, dtype: str) -> OptimizerConfig:
    """The optimizer's own configuration, for parameters of a dtype; the scheduler sets the rate of every step."""
    return of_equal_names(
        OptimizerConfig,
        options,
        optimizer=options.name,
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        params_dtype=DTYPES[dtype],
    )


def ddp_config(config: JobConfig) -> DistributedDataParallelConfig:
    """The wrapper's own configuration. With float16 a gradient that is not finite ends no run: the loss scale falls."""
    if config.model.dtype == "float16" and config.ddp.check_for_nan_in_grad:
        return replace(config.ddp, check_for_nan_in_grad=False, record_nan_in_grad=True)
    return config.ddp


def zero_config(zero: int) -> DistributedDataParallelConfig:
    """Return the wrapper's configuration of a Hugging Face model, by the stage of ZeRO from 0 to 3."""
    return DistributedDataParallelConfig(
        data_parallel_sharding_strategy=STRATEGIES[zero],
        use_distributed_optimizer=zero > 0,
        overlap_grad_reduce=True,
        overlap_param_gather=zero in (1, 2),
        check_for_nan_in_grad=True,
    )

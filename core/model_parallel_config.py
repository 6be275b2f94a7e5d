"""Configuration fields that the layers and the gradient path read from a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from core.number_ranges import COUNT, NOT_NEGATIVE, check_ranges
from core.watch.warn_user import warn_user

RANGES = {
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), COUNT),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "expert_model_parallel_size"), COUNT),
    "expert_tensor_parallel_size": COUNT,
    "moe_router_bias_update_rate": NOT_NEGATIVE,
}


# Not frozen: users set the callbacks once optimizer and wrapper exist. Nothing in `core` writes to it.
@dataclass
class ModelParallelConfig:
    """Configures a model's parallel layout, dtypes and schedule callbacks, using Megatron Core's field names.

    Layers and ``DistributedDataParallel`` read this configuration, and a model's own config usually extends it.
    The callbacks may be assigned later, once the wrapper and the optimizer exist.

    Args:
        tensor_model_parallel_size: Number of ranks that split each layer.
        pipeline_model_parallel_size: Number of pipeline ranks.
        virtual_pipeline_model_parallel_size: Number of model chunks per rank in an interleaved pipeline.
        context_parallel_size: Number of ranks that split each sequence.
        expert_model_parallel_size: Number of ranks that a layer's experts are distributed over.
        expert_tensor_parallel_size: Number of ranks that split each expert. Defaults to tensor_model_parallel_size.
        sequence_parallel: Split the activations between tensor-parallel layers along the sequence, which saves memory.
        params_dtype: Parameter dtype.
        fp16, bf16: Must agree with params_dtype if it is a 16-bit dtype. They have no effect, and warn, with fp32.
        perform_initialization: Draw initial weights. With False, weights stay uninitialized because they will be
            loaded.
        use_cpu_initialization, has_cond_embedder: No effect, because both always hold here; a warning if True.
        gradient_accumulation_fusion: Add weight gradients of tensor-parallel layers directly to the gradient buffer.
        calculate_per_token_loss: The loss is a sum over tokens, and gradients are divided by the global number of
            tokens.
        deterministic_mode: Reduce in rank order, like deterministic_reduction in the wrapper's config.
        qk_layernorm: Normalize queries and keys in each head.
        moe_router_enable_expert_bias: Balance experts by a bias on the router's scores instead of a loss.
        moe_router_bias_update_rate: Change of that bias per step.
        timers: An object like Megatron's ``Timers``, which finalize_model_grads starts and stops.
        barrier_with_L1_time: Synchronize all ranks before a timer starts.
        no_sync_func: Context manager that disables gradient reduction, or a list with one per model chunk.
        grad_sync_func, param_sync_func: Called by a schedule when a chunk's gradients can be reduced, or its parameters
            gathered.
        finalize_model_grads_func: Called at the end of a schedule. Defaults to finalize_model_grads.
        grad_scale_func: Maps each loss to the scaled loss on which backward is called.

    Raises:
        ValueError: If fields contradict each other. The message names both.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None  # tensor_model_parallel_size where None
    sequence_parallel: bool = False

    params_dtype: torch.dtype = torch.float32
    fp16: bool = False
    bf16: bool = False
    perform_initialization: bool = True
    use_cpu_initialization: bool = False

    gradient_accumulation_fusion: bool = False
    calculate_per_token_loss: bool = False
    deterministic_mode: bool = False

    qk_layernorm: bool = False
    has_cond_embedder: bool = False
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3

    timers: Any | None = None
    barrier_with_L1_time: bool = False

    no_sync_func: Callable[..., Any] | None = None
    grad_sync_func: Callable[..., Any] | None = None
    param_sync_func: Callable[..., Any] | None = None
    finalize_model_grads_func: Callable[..., Any] | None = None
    grad_scale_func: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel=True with tensor_model_parallel_size=1: the sequence is split over the tensor "
                "parallel ranks, so there must be at least 2; set sequence_parallel=False or a larger size."
            )
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                f"virtual_pipeline_model_parallel_size={self.virtual_pipeline_model_parallel_size} with "
                f"pipeline_model_parallel_size=1: pipeline-model-parallel size should be greater than 1 with "
                f"interleaved schedule."
            )
        if self.fp16 and self.bf16:
            raise ValueError("fp16=True and bf16=True; choose one of them.")
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            if not getattr(self, name) or self.params_dtype == dtype:
                continue
            made = f"parameters are made in params_dtype={self.params_dtype}; set params_dtype={dtype}"
            if self.params_dtype != torch.float32:
                raise ValueError(f"{name}=True contradicts params_dtype: {made}, or leave {name} out.")
            _warn(name, f"{made}, or convert the model")
        if self.use_cpu_initialization:
            _warn("use_cpu_initialization", "weights are drawn whole in any case, in fp32 on the CPU")
        if self.has_cond_embedder:
            _warn("has_cond_embedder", "gradients of parameters with `param.pipeline_parallel = True` are summed over "
                  "the stages in any case")  # fmt: skip
        if self.moe_router_enable_expert_bias and not self.moe_router_bias_update_rate > 0:
            raise ValueError(
                f"moe_router_bias_update_rate must be above 0 with moe_router_enable_expert_bias=True, got "
                f"{self.moe_router_bias_update_rate}."
            )


def _warn(name: str, why: str) -> None:
    warn_user(f"{name}=True changes nothing here: {why}")
